#!/usr/bin/env python
"""Compares detspec with Hugging Face transformers on torch: same weights, prompts, batch and machine.

Needs `pip install "detspec[parity]"`. Both generate greedily in turn, prefill included. transformers runs with bfloat16 and
with float32 weights; the faster of both counts. Greedy tokens are compared to show that both do the same work. In bfloat16 they
differ from the first near-tie on, after which the texts are unrelated.

    python scripts/compare_transformers.py --preset random_100m --batches 1 8 32 --json out/transformers.json
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from detspec import Engine, EngineConfig, InputError, Model, Needs, SamplingParams, default_schedule, load
from detspec.bench.bench import bench_prompts, random_model
from detspec.checkpoint.hf import save_hf
from detspec.model.params import num_params
from detspec.presets import preset

try:
    import torch
    import transformers
except ModuleNotFoundError as missing:
    sys.exit(f'compare_transformers needs torch and transformers, and {missing.name} is missing: pip install "detspec[parity]"')

ORDINARY = "detspec ordinary"
DETERMINISTIC = "detspec deterministic"
Run = Callable[[], list[list[int]]]
Variants = dict[str, tuple[Any, dict[str, Any]]]  # transformers model and cache arguments of its `generate`, by name


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the JSON."""
    args = parse(argv)
    torch.set_num_threads(os.cpu_count() or 1)
    model = random_model(preset(args.preset)) if args.preset else load(args.model)
    with tempfile.TemporaryDirectory() as folder:
        save_hf(Path(folder) / "model", model.cfg, model.params, eos_ids=())
        others = load_others(Path(folder) / "model", args.caches)
    result = {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            **Engine(model, EngineConfig(max_requests=1, max_len=default_schedule().budget.window)).fingerprint(),
        },
        "model": model.cfg.to_json() | {"num_params": num_params(model.cfg)},
        "settings": {
            "prompt_len": args.prompt_len,
            "new_tokens": args.new_tokens,
            "repeats": args.repeats,
            "torch_threads": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
        },
        "batches": [compare(model, others, batch, args) for batch in args.batches],
    }
    print(table(result))
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="DIR", help="a Hugging Face folder (default: the shipped model)")
    which.add_argument("--preset", metavar="NAME", help="random weights of this shape")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="batch sizes")
    parser.add_argument("--caches", nargs="+", default=["dynamic"], choices=("dynamic", "static"), help="transformers' caches")
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="new tokens of each request")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="number of rounds")
    parser.add_argument("--json", metavar="FILE", help="write all samples to this file")
    return parser.parse_args(argv)


def load_others(folder: Path, caches: Sequence[str]) -> Variants:
    """The transformers model in bfloat16 and float32, with each of `caches`."""
    models = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        loaded.generation_config.eos_token_id = None  # every run has the same length
        for cache in caches:
            models[f"transformers {name} {cache}"] = (loaded, {} if cache == "dynamic" else {"cache_implementation": "static"})
    return models


def compare(model: Model, others: Variants, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every runner at one batch size, and how long their greedy tokens agree with ours."""
    prompts = bench_prompts(model, batch, args.prompt_len)
    runners = {
        ORDINARY: ours(model, prompts, args.new_tokens, deterministic=False),
        DETERMINISTIC: ours(model, prompts, args.new_tokens, deterministic=True),
    }
    for name, (other, cache) in others.items():
        runners[name] = theirs(other, cache, prompts, args.new_tokens)
    answers = {name: run() for name, run in runners.items()}  # compiles, certifies, warms up
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(args.repeats):
        for name, run in runners.items():
            began = time.perf_counter()
            run()
            samples[name].append(batch * args.new_tokens / (time.perf_counter() - began))
            print(f"batch {batch}: {name} {samples[name][-1]:.1f} tok/s", file=sys.stderr)
    best = max(others, key=lambda name: median(samples[name]))
    ratios = {name: median(mine / other for mine, other in zip(samples[name], samples[best], strict=True)) for name in runners}
    return {
        "batch": batch,
        "best_transformers": best,
        "runners": {
            name: {
                "tok_per_s": samples[name],
                "median_tok_per_s": median(samples[name]),
                "ratio_to_best_transformers": ratios[name],
                "same_first_token": agreement(answers[DETERMINISTIC], answers[name], 1),
                "same_until_first_difference": agreement(answers[DETERMINISTIC], answers[name], args.new_tokens),
            }
            for name in runners
        },
    }


def ours(model: Model, prompts: list[tuple[int, ...]], new_tokens: int, *, deterministic: bool) -> Run:
    """Generates with the engine's default, `method="auto"`."""
    max_len = max(len(prompts[0]) + new_tokens, default_schedule().budget.window)
    engine = Engine(model, EngineConfig(max_requests=len(prompts), max_len=max_len))
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, deterministic=deterministic)
    engine.prepare(len(prompts), Needs.of([sampling]))
    return lambda: [list(completion.token_ids) for completion in engine.generate(prompts, sampling)]


def theirs(model: Any, cache: dict[str, Any], prompts: list[tuple[int, ...]], new_tokens: int) -> Run:
    """Generates with transformers; all prompts have one length, so nothing is padded."""
    ids = torch.tensor(prompts)

    def run() -> list[list[int]]:
        with torch.inference_mode(), contextlib.redirect_stdout(sys.stderr):
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **cache
            )
        return answer[:, ids.shape[1] :].tolist()

    return run


def agreement(answers: list[list[int]], others: list[list[int]], num_tokens: int) -> float:
    """Mean share of the first `num_tokens` tokens that come before the first difference."""
    same = np.asarray(answers)[:, :num_tokens] == np.asarray(others)[:, :num_tokens]
    return float(np.cumprod(same, axis=1).mean())


def table(result: dict[str, Any]) -> str:
    """The result as aligned text."""
    versions = result["versions"]
    model = result["model"]
    settings = result["settings"]
    lines = [
        f"{model['num_params'] / 1e6:.1f} M parameters, {model['dtype']}; prompt {settings['prompt_len']}, "
        f"{settings['new_tokens']} new tokens, greedy, median of {settings['repeats']}",
        f"{versions['device_kind']}, {settings['torch_threads']} threads, load {settings['load_average']:.1f} at first; "
        f"jax {versions['jax']}, torch {versions['torch']}, transformers {versions['transformers']}",
        "",
        f"{'batch':>5}  {'':<32}{'tok/s':>9}{'/ best transformers':>21}{'first token':>13}{'agrees until':>14}",
    ]
    for entry in result["batches"]:
        for name, run in entry["runners"].items():
            lines.append(
                f"{entry['batch']:>5}  {name + (' *' if name == entry['best_transformers'] else ''):<32}"
                f"{run['median_tok_per_s']:>9.1f}{run['ratio_to_best_transformers']:>21.3f}"
                f"{run['same_first_token']:>13.1%}{run['same_until_first_difference']:>14.1%}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"compare_transformers: error: {error}")
