"""The speed of deterministic generation compared with ordinary generation, in one process.

1. Every case of a batch size runs once untimed: programs are compiled and certified.
2. `repeats` rounds run each case once, so that drift of the machine meets all cases alike. A case is compared with the ordinary
   run of its own round.
3. The device's read bandwidth and its best matrix product say what bounds an ordinary step.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from detspec.bench.bound import bound, measure_machine
from detspec.bench.rounds import Variants, cases_of, counted_runs, measure
from detspec.checkpoint.load import Model
from detspec.choices import BENCH_MODES
from detspec.config import ModelConfig
from detspec.demo.demo import demo_prompts
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.environment import default_schedule
from detspec.errors import InputError
from detspec.model.dense import config_to_json
from detspec.model.params import init_params, num_params, params_bytes


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """Settings of a measurement; `InputError` for an unknown mode, a share outside 0 .. 100, or nothing to measure."""

    batches: Sequence[int] = (1, 8, 32)  # numbers of requests in flight
    # some of "ordinary" (nothing is verified; always measured, for comparison), "canonical" (one canonical row per request),
    # "batch_invariant" (the same with pinned products, so that kernels alone make every pass invariant), "ngram" (prompt
    # lookup), "dvr" (self draft, each of `windows`), "auto" (the engine chooses; drafts of the longest of `windows`)
    modes: Sequence[str] = BENCH_MODES
    # percentages of deterministic requests for "dvr" and "auto", rounded up to whole requests
    shares: Sequence[int] = (0, 10, 50, 100)
    windows: Sequence[int] = (4, 16)  # `W` for "dvr"
    prompt_len: int = 64  # tokens of each prompt
    new_tokens: int = 128  # new tokens of each request
    repeats: int = 5  # rounds

    def __post_init__(self) -> None:
        if unknown := [mode for mode in self.modes if mode not in BENCH_MODES]:
            raise InputError(f"unknown mode {unknown[0]!r}; there are {', '.join(BENCH_MODES)}")
        if bad := [share for share in self.shares if not 0 <= share <= 100]:
            raise InputError(f"shares are percentages from 0 to 100, got {bad[0]!r}")
        for name in ("batches", "modes", "shares", "windows"):
            if len(getattr(self, name)) == 0:
                raise InputError(f"{name} is empty: there is nothing to measure")
        for name in ("prompt_len", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if bad := [batch for batch in self.batches if batch < 1]:
            raise InputError(f"batches must be at least 1, got {bad[0]!r}")


def run_bench(
    model: Model, settings: BenchSettings | None = None, *, on_progress: Callable[[int, int, str], None] | None = None
) -> dict[str, Any]:
    """Measures tokens per second, prefill included, greedy, with all requests of a batch starting together.

    `random_model` makes a model of any size. Before each run `on_progress` is called with the number of runs done, the number
    of all runs, and the next one's name.

    Returns:
        A dictionary that JSON can hold: `fingerprint`, `model`, `settings`, `machine`; for each of `batches` its `bound`, its
        `cases` with all samples, and its `bits`; `variants`, the most different results, bit for bit, that one request gave in
        each mode over all batch sizes.

    Raises `InputError` if the requests do not fit the model.
    """
    settings = settings or BenchSettings()
    prompts = bench_prompts(model, max(settings.batches), settings.prompt_len)
    cases = {batch: cases_of(batch, settings.modes, settings.shares, settings.windows) for batch in settings.batches}
    on_run = counted_runs(sum(len(c) for c in cases.values()) * (settings.repeats + 1), on_progress)
    machine = measure_machine(model.cfg)
    context = settings.prompt_len + settings.new_tokens / 2
    by_mode = Variants()
    measured = []
    for batch in settings.batches:
        requests = prompts[:batch]
        entry = measure(model, cases[batch], requests, settings.new_tokens, settings.repeats, on_run, by_mode)
        step_ms = 1e3 * batch / entry["cases"][0]["median_tok_per_s"]  # the first case is "ordinary"
        limits = bound(model.cfg, machine, batch=batch, context=context, step_ms=step_ms)
        measured.append({"batch": batch, "bound": limits, **entry})
    return {
        "fingerprint": Engine(
            model, EngineConfig(max_requests=1, max_len=default_schedule(model.cfg).budget.window)
        ).fingerprint(),
        "model": {**config_to_json(model.cfg), "num_params": num_params(model.cfg), "bytes": params_bytes(model.params)},
        "settings": {**json.loads(json.dumps(vars(settings))), "temperature": 0.0},
        "machine": machine,
        "batches": measured,
        "variants": {
            mode: by_mode.most(f"{mode} {'ordinary' if mode == 'ordinary' else 'deterministic'}")
            for mode in dict.fromkeys(("ordinary", *settings.modes))
        },
    }


def bench_table(result: dict[str, Any]) -> str:
    """The result of `run_bench` as aligned text, a block for each batch size."""
    model = result["model"]
    machine = result["machine"]
    settings = result["settings"]
    lines = [
        f"{model['num_params'] / 1e6:.1f} M parameters, {model['dtype']}, {model['bytes'] / 1e6:.0f} MB; "
        f"prompt {settings['prompt_len']}, {settings['new_tokens']} new tokens, greedy, median of {settings['repeats']}",
        f"{result['fingerprint']['device_kind']}, {machine['cpu_count']} cores, load {machine['load_average']:.1f} at first, "
        f"jax {result['fingerprint']['jax']}; weights read at {machine['read_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"matrix product {machine['flop_per_s'] / 1e12:.2f} TFLOP/s",
    ]
    for entry in result["batches"]:
        limits = entry["bound"]
        bits = entry["bits"]
        lines += [
            "",
            f"batch {entry['batch']}: an ordinary step takes {limits['step_ms']:.2f} ms; reading {limits['bytes'] / 1e6:.1f} "
            f"MB needs {limits['memory_ms']:.2f}, {limits['flop'] / 1e9:.2f} GFLOP need {limits['compute_ms']:.2f}: "
            f"bound by {limits['name']}",
            f"  {'':<16}{'tok/s':>9}{'lowest':>9}{'highest':>9}{'/ ordinary':>12}"
            f"{'accepted':>10}{'rollbacks':>11}{'recomputed':>12}",
        ]
        for case in entry["cases"]:
            if case["refused"]:
                lines.append(f"  {case['label']:<16}refused: {case['refused']}")
                continue
            accepted = f"{100 * case['draft_acceptance_rate']:.2f} %" if case["num_draft_tokens"] else "-"
            lines.append(
                f"  {case['label']:<16}{case['median_tok_per_s']:>9.1f}{min(case['tok_per_s']):>9.1f}"
                f"{max(case['tok_per_s']):>9.1f}{case['ratio_to_ordinary']:>12.3f}{accepted:>10}"
                f"{case['num_rollbacks']:>11}{case['num_recomputed_tokens']:>12}"
            )
        lines.append(
            f"  bits: {bits['deterministic_variants']} different result(s) of any deterministic request; "
            f"{bits['ordinary_differ']} of {bits['ordinary_compared']} ordinary results differ from the deterministic ones"
        )
    variants = ", ".join(f"{mode} {number}" for mode, number in result["variants"].items() if number)
    lines += ["", f"different results of one request over all batch sizes, at most: {variants}"]
    return "\n".join(lines)


def random_model(cfg: ModelConfig, seed: int = 0) -> Model:
    """Random weights of shape `cfg`, no tokenizer; the digest is made from config and seed, not from the weights."""
    digest = hashlib.sha256(json.dumps(["random", seed, config_to_json(cfg)], sort_keys=True).encode()).hexdigest()
    return Model(cfg, init_params(cfg, jax.random.key(seed)), tokenizer=None, eos_ids=(), digest=digest)


def bench_prompts(model: Model, number: int, prompt_len: int) -> list[tuple[int, ...]]:
    """`number` different prompts of `prompt_len` tokens: spans of the demo's texts, or random ids without a tokenizer."""
    if model.tokenizer is None:
        ids = np.random.default_rng(0).integers(0, model.cfg.vocab_size, size=(number, prompt_len))
        return [tuple(row) for row in ids.tolist()]
    stream = [token for prompt in demo_prompts() for token in model.tokenizer.encode(f"{prompt}\n\n")]
    stream *= 1 + (number + prompt_len) // len(stream)
    stride = max(1, (len(stream) - prompt_len) // number)
    return [tuple(stream[i * stride : i * stride + prompt_len]) for i in range(number)]
