"""Weights in int8 next to bfloat16: loss of the shipped model on held-out files, and speed as weights and as a draft.

    python scripts/measure_int8.py --json out/int8.json

The loss is the mean over tokens of the canonical pass's log-probabilities. Speed is that of deterministic greedy requests,
prompts included: the median of the rounds, and the median of the ratios within rounds, by turns in one process. As a draft, the
rounded weights draft and the bfloat16 model verifies; its speed is relative to ordinary generation, and "argmax" is how many of
its tokens are the likeliest ones, which is what drafting without noise could get right. Held-out files are those of
`configs/tiny_python.py`; another Python has others.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import tokenizers

import detspec as ds
from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.folder import SHIPPED_MODELS, find_folder
from detspec.checkpoint.load import Model, load
from detspec.compile_cache import enable_jax_cache
from detspec.config import ModelConfig
from detspec.model.params import init_params, params_bytes, quantized
from detspec.presets import preset
from detspec.train.batches import cut_rows, encode_documents
from detspec.train.corpus import read_corpus

HOLDOUT_ONE_IN = 25  # as in configs/tiny_python.py
TEXT_LEN = 512
TEXTS = 8  # scored together
PROMPT_LEN = 16
WEIGHTS = (None, "int8")
DRAFTS: dict[str, str | tuple[str, ...]] = {"none": "none", "int8": "int8", "chosen": ("none", "ngram", "int8")}
TEMPERATURES = (0.0, 1.0)


def main() -> int:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heldout-tokens", type=int, default=16384, help="held-out tokens; 0 leaves the loss out")
    parser.add_argument(
        "--models", nargs="*", default=["tiny_python", "random_100m"], help="shipped models and presets to time"
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="requests in flight")
    parser.add_argument("--draft-requests", type=int, nargs="*", default=[1, 8], help="the same for drafts in int8")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=5, help="rounds")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    args = parser.parse_args()
    enable_jax_cache()
    result: dict[str, Any] = {"fingerprint": ds.fingerprint(), "loss": {}, "speed": [], "draft": []}
    if args.heldout_tokens:
        result["loss"] = losses(args.heldout_tokens)
    for name in args.models:
        result["speed"] += [speeds(name, number, args.new_tokens, args.rounds) for number in args.requests]
        for number in args.draft_requests:
            result["draft"] += [drafts(name, number, args.new_tokens, args.rounds, t) for t in TEMPERATURES]
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def losses(num_tokens: int) -> dict[str, float]:
    """Nats per held-out token of the shipped model in each kind of weights."""
    rows = heldout_rows(num_tokens)
    found = {}
    for weights in WEIGHTS:
        model = load(weights=weights)
        kind = weights or model.cfg.dtype
        found[kind] = nats_per_token(model, rows, ds.default_schedule(model.cfg))
        print(f"{kind:>9} {params_bytes(model.params) / 1e6:7.2f} MB {found[kind]:.4f} nats a token", flush=True)
    first, second = found.values()
    print(f"int8 over {model.cfg.dtype}: {second / first:.5f}, {len(rows) * (TEXT_LEN - 1):,} tokens")
    return found


def heldout_rows(num_tokens: int) -> list[list[int]]:
    """About `num_tokens` held-out tokens, in texts of TEXT_LEN."""
    tokenizer = tokenizers.Tokenizer.from_file(str(find_folder(None) / "tokenizer.json"))
    documents = encode_documents(tokenizer, read_corpus("python_stdlib", HOLDOUT_ONE_IN).heldout)
    return cut_rows(documents, TEXT_LEN - 1)[: max(1, num_tokens // TEXT_LEN)].tolist()


def nats_per_token(model: Model, rows: list[list[int]], schedule: ds.Schedule) -> float:
    """The loss that canonical passes of `schedule` find, by which their numerics are compared."""
    logprobs = [
        one
        for start in range(0, len(rows), TEXTS)
        for one in ds.score(model.params, model.cfg, rows[start : start + TEXTS], schedule=schedule, max_len=TEXT_LEN + 1)
    ]
    return -float(np.mean([one[1:] for one in logprobs], dtype=np.float64))


def speeds(name: str, num_requests: int, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of both kinds of weights by turns."""
    models = [load(name, weights=kind) for kind in WEIGHTS] if name in SHIPPED_MODELS else random_models(preset(name))
    config = ds.EngineConfig(max_requests=num_requests, max_len=128 + new_tokens, method="none")
    engines = [ds.Engine(model, config) for model in models]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, models[0].cfg.vocab_size, PROMPT_LEN).tolist() for _ in range(num_requests)]
    sampling = ds.SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    taken: list[list[float]] = [[], []]
    for _ in range(rounds + 1):  # the first one compiles
        for engine, times in zip(engines, taken, strict=True):
            began = time.perf_counter()
            engine.generate(prompts, sampling)
            times.append(time.perf_counter() - began)
    plain, rounded = (np.asarray(times[1:]) for times in taken)
    ratio = median((plain / rounded).tolist())
    tok_per_s = [num_requests * new_tokens / median(times.tolist()) for times in (plain, rounded)]
    print(
        f"{name:>12} {num_requests:3} requests: {models[0].cfg.dtype} {tok_per_s[0]:8.1f}, int8 {tok_per_s[1]:8.1f} tok/s, "
        f"int8 is {ratio:.2f} times as fast",
        flush=True,
    )
    return {"model": name, "requests": num_requests, "seconds": [plain.tolist(), rounded.tolist()], "ratio": ratio}


def drafts(name: str, num_requests: int, new_tokens: int, rounds: int, temperature: float) -> dict[str, Any]:
    """Speed of deterministic requests over ordinary ones, by draft, and how many of the draft's tokens agree."""
    model = load(name) if name in SHIPPED_MODELS else random_models(preset(name))[0]
    engines = {
        label: ds.Engine(model, ds.EngineConfig(max_requests=num_requests, max_len=128 + new_tokens, method=method))
        for label, method in {"ordinary": "none", **DRAFTS}.items()
    }
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.cfg.vocab_size, PROMPT_LEN).tolist() for _ in range(num_requests)]
    common = ds.SamplingParams(max_tokens=new_tokens, temperature=temperature, ignore_eos=True)
    seconds: dict[str, list[float]] = {label: [] for label in engines}
    texts: dict[str, list[tuple[int, ...]]] = {}
    for number in range(rounds + 1):  # the first one compiles
        for label, engine in engines.items():
            sampling = [
                dataclasses.replace(common, seed=number * num_requests + row, deterministic=label != "ordinary")
                for row in range(num_requests)
            ]
            if number == 0:
                engine.prepare(num_requests, ds.Needs.of(sampling))
            began = time.perf_counter()
            texts[label] = [completion.token_ids for completion in engine.generate(prompts, sampling)]
            seconds[label].append(time.perf_counter() - began)
        if any(texts[label] != texts["none"] for label in DRAFTS):
            raise SystemExit(f"error: drafts of {name} changed tokens: {texts}")
    ratios = {
        label: median((np.asarray(seconds["ordinary"][1:]) / np.asarray(seconds[label][1:])).tolist()) for label in DRAFTS
    }
    likeliest = engines["none"].generate(prompts, dataclasses.replace(common, logprobs=1))
    argmax = np.mean(
        [top[0][0] == token for one in likeliest for top, token in zip(one.top_logprobs, one.token_ids, strict=True)]
    )
    stats = engines["int8"].stats
    agreed = stats.num_accepted_draft_tokens / max(1, stats.num_accepted_draft_tokens + stats.num_rollbacks)
    print(
        f"{name:>12} {num_requests:3} requests, T {temperature:g}, over ordinary:"
        + "".join(f" {label} {ratio:.2f}," for label, ratio in ratios.items())
        + f" {agreed:.4f} of guesses after agreed ones agree, of {stats.num_draft_tokens} drafted; argmax {argmax:.4f}",
        flush=True,
    )
    accepted = {"accepted": agreed, "drafted": stats.num_draft_tokens, "argmax": float(argmax)}
    row = {"model": name, "requests": num_requests, "temperature": temperature}
    return {**row, "seconds": seconds, "over_ordinary": ratios, **accepted}


def random_models(cfg: ModelConfig) -> list[Model]:
    """Random weights of `cfg`, as they are and rounded."""
    params = init_params(cfg, jax.random.key(0))
    models = [(cfg, params), (dataclasses.replace(cfg, weights="int8"), quantized(params, cfg))]
    return [Model(each, weights, None, (), digest_model(each, weights)) for each, weights in models]


if __name__ == "__main__":
    raise SystemExit(main())
