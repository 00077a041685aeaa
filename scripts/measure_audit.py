#!/usr/bin/env python
"""How much faster an audit replays completions than they were generated: the same requests, in one process, in turn.

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
from detspec.engine.replayer import Replayer
from detspec.engine.request import Request
from detspec.environment import fingerprint
from detspec.sampling_params import SamplingParams

REPLAYED_ROWS = 32  # as many as `detspec audit` takes
KINDS = {"greedy": (0.0,), "sampled": (0.8,), "mixed": (0.0, 0.8)}  # temperatures, by turns


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; exit code 1 if a completion does not replay to its bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", default=None, help="a model folder (default: the small model shipped)")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=100, help="tokens of a prompt, give or take a fifth")
    parser.add_argument("--new-tokens", type=int, default=150, help="of a request, give or take a fifth")
    parser.add_argument("--max-requests", type=int, nargs="+", default=[4, 8, 32], help="of the engine; the replayer has 32")
    parser.add_argument("--max-len", type=int, default=512, help="of the engine and of the replayer")
    parser.add_argument("--repeats", type=int, default=5, help="of each, one after the other")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    args = parser.parse_args(argv)
    model = load(args.model)
    # Sharing would let the later rounds of generation skip prompts that they know.
    engines = {
        rows: Engine(model, EngineConfig(max_requests=rows, max_len=args.max_len, prefix_sharing=False))
        for rows in args.max_requests
    }
    for engine in engines.values():
        engine.prepare(args.requests)
    replayer = Replayer(model, EngineConfig(schedule=engine.schedule, max_requests=REPLAYED_ROWS, max_len=args.max_len))
    replayer.prepare()
    figures = []
    print(f"{args.requests} requests, median of {args.repeats}; the replay reads {replayer.schedule.budget.rows} rows a pass")
    print(f"{'rows':>4}  {'':8}{'generate':>12}{'replay':>12}{'ratio':>20}")
    print(f"{'':4}  {'':8}{'new tok/s':>12}{'new tok/s':>12}{'least':>10}{'median':>10}")
    for rows, engine in engines.items():
        for kind, temperatures in KINDS.items():
            asked = requests(model.cfg.vocab_size, args, temperatures)
            rounds = [measure(engine, replayer, asked) for _ in range(args.repeats + 1)][1:]  # the first warms up
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
    """Random prompts; texts of the lengths that are asked for."""
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


def measure(engine: Engine, replayer: Replayer, asked: Sequence[Request]) -> tuple[int, dict[str, float]]:
    """New tokens, and the seconds of generating and of replaying them."""
    began = time.perf_counter()
    completions = {completion.id: completion for completion in engine.run(list(asked))}
    generated = time.perf_counter()
    replays = list(replayer.run((request, completions[request.id].token_ids) for request in asked))
    replayed = time.perf_counter()
    for request, replay in zip(asked, replays, strict=True):
        completion = completions[request.id]
        n = len(completion.token_ids)
        bits = np.asarray(completion.logprobs, np.float32).tobytes()
        if replay.targets[:n].tolist() != list(completion.token_ids) or replay.logprobs[:n].tobytes() != bits:
            raise SystemExit(f"request {request.id} does not replay to its bits")
    num_tokens = sum(len(completion.token_ids) for completion in completions.values())
    return num_tokens, {"generate": generated - began, "replay": replayed - generated}


if __name__ == "__main__":
    raise SystemExit(main())
