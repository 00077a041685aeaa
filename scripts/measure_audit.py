#!/usr/bin/env python
"""Measures how much faster an audit replays completions than they are generated: same requests and process, in turn.

python scripts/measure_audit.py --repeats 5 --json audit.json
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from detspec.checkpoint.load import load
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs
from detspec.engine.request import Request
from detspec.environment import fingerprint
from detspec.sampling_params import SamplingParams

REPLAYED_ROWS = 32  # records replayed together, as in `detspec audit`
KINDS = {"greedy": (0.0,), "sampled": (0.8,), "mixed": (0.0, 0.8)}  # temperatures, used in turn


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; exits with an error if a replayed completion has other bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", default=None, help="a model folder (default: the small model shipped)")
    parser.add_argument("--requests", type=int, default=128, help="number of requests")
    parser.add_argument("--prompt-len", type=int, default=100, help="mean tokens of a prompt; lengths vary by a fifth")
    parser.add_argument("--new-tokens", type=int, default=150, help="mean new tokens of a request; they vary by a fifth")
    parser.add_argument("--max-requests", type=int, nargs="+", default=[4, 8, 32], help="requests in flight; replays use 32")
    parser.add_argument("--max-len", type=int, default=512, help="most positions of a sequence, in both engines")
    parser.add_argument("--repeats", type=int, default=5, help="number of rounds; each generates and then replays")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args(argv)
    model = load(args.model)
    # With prefix sharing, later rounds of generation would skip prompts in the cache.
    engines = {
        rows: Engine(model, EngineConfig(max_requests=rows, max_len=args.max_len, prefix_sharing=False))
        for rows in args.max_requests
    }
    for engine in engines.values():
        engine.prepare(args.requests, Needs(ordinary=False, processing=False))
    config = EngineConfig(schedule=engine.schedule, max_requests=REPLAYED_ROWS, max_len=args.max_len, method="none")
    replaying = Engine(model, config)
    replaying.prepare_replays()
    figures = []
    num_rows = replaying.replicas[0].large.budget.rows
    print(f"{args.requests} requests, median of {args.repeats}; the replay reads {num_rows} rows per pass")
    print(f"{'size':>4}  {'':8}{'generate':>12}{'replay':>12}{'ratio':>20}")
    print(f"{'':4}  {'':8}{'new tok/s':>12}{'new tok/s':>12}{'least':>10}{'median':>10}")
    for rows, engine in engines.items():
        for kind, temperatures in KINDS.items():
            asked = requests(model.cfg.vocab_size, args, temperatures)
            rounds = [measure(engine, replaying, asked) for _ in range(args.repeats + 1)][1:]  # the first warms up
            speeds = {what: [number / seconds[what] for number, seconds in rounds] for what in ("generate", "replay")}
            ratios = [seconds["generate"] / seconds["replay"] for _, seconds in rounds]
            figures.append({"rows": rows, "kind": kind, "tok_per_s": speeds, "ratios": ratios})
            medians = "".join(f"{median(speeds[what]):12,.0f}" for what in speeds)
            print(f"{rows:4}  {kind:8}{medians}{min(ratios):10.2f}{median(ratios):10.2f}", flush=True)
    if args.json:
        found = {"fingerprint": fingerprint(), "settings": vars(args), "figures": figures}
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def requests(vocab_size: int, args: argparse.Namespace, temperatures: Sequence[float]) -> list[Request]:
    """Requests with random prompts and the lengths that `args` gives."""
    rng = np.random.default_rng(0)

    def around(length: int) -> int:
        return int(rng.integers(length - length // 5, length + length // 5 + 1))

    made = []
    for i in range(args.requests):
        prompt = rng.integers(0, vocab_size, around(args.prompt_len)).tolist()
        temperature = temperatures[i % len(temperatures)]
        sampling = SamplingParams(
            max_tokens=around(args.new_tokens), temperature=temperature, seed=i, ignore_eos=True, deterministic=True
        )
        made.append(Request(str(i), tuple(prompt), sampling))
    return made


def measure(engine: Engine, replaying: Engine, asked: Sequence[Request]) -> tuple[int, dict[str, float]]:
    """Number of new tokens, and the seconds of generating and of replaying them."""
    began = time.perf_counter()
    completions = {completion.id: completion for completion in engine.run(list(asked))}
    generated = time.perf_counter()
    replays = list(replaying.replay((request, completions[request.id].token_ids) for request in asked))
    replayed = time.perf_counter()
    for request, replay in zip(asked, replays, strict=True):
        completion = completions[request.id]
        n = len(completion.token_ids)
        bits = np.asarray(completion.logprobs, np.float32).tobytes()
        if replay.targets[:n].tolist() != list(completion.token_ids) or replay.logprobs[:n].tobytes() != bits:
            raise SystemExit(f"request {request.id}: the replay has other bits")
    num_tokens = sum(len(completion.token_ids) for completion in completions.values())
    return num_tokens, {"generate": generated - began, "replay": replayed - generated}


if __name__ == "__main__":
    raise SystemExit(main())
