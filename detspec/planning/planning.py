"""`detspec plan`: the memory that a model needs on a device that is not at hand, and the speed to expect.

1. Weights and cache must fit into the memory that the device's programs may use.
2. The engine's draft step and canonical pass are compiled for the device. This gives their memory exactly. Parameters and
   state are shapes; nothing is allocated.
3. Bytes and FLOP of both passes over the device's peaks give their least time. Speeds are predicted from it.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from detspec.cache import cache_bytes
from detspec.config import ModelConfig, is_count
from detspec.draft.given import RECORDED
from detspec.draft.source import Drafter, draft_fn
from detspec.engine.policy import Drafting, canonical_plans, lookup_window
from detspec.errors import InputError
from detspec.generation.init import init_state
from detspec.generation.loop import dvr_step, ordinary_step
from detspec.held import compiler_options
from detspec.model.dense import config_to_json
from detspec.model.params import Params, num_params, param_shapes, params_bytes
from detspec.model.work import pass_work
from detspec.roofline import Work
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.target_compilers import Compiled, compile_for, compilers
from detspec.targets import GPU_SHARE, Target

ACCEPTANCE = 0.99  # probability that a self-drafted token is accepted: LLM-42 and our own runs see this, rounded down
LOOKUP_TOKENS = 2.0  # tokens a step with prompt lookup, an assumption: published are 1.3 to 1.8 for chats, 3 to 5 for edits
MAX_STOP_IDS = 16  # the engine's default, like the next
MAX_LOGIT_BIAS = 64
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# The TPU compiler's messages about the device's memory, arguments included: "total memory required for HLO temporaries
# (28.06G) exceeds available HBM (15.75G)" or "Used 17.20G of 15.75G hbm". Messages about VMEM do not match.
OUT_OF_MEMORY = re.compile(
    r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT]?)(?:\) exceeds available HBM \(| of )([\d.]+)([KMGT]?)(?:\)| hbm)"
)


def plan(
    cfg: ModelConfig,
    target: Target,
    *,
    schedule: Schedule,
    max_requests: int = 32,
    max_len: int = 1024,
    on_stage: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Compiles `cfg`'s draft step and canonical pass for one device of `target`, and predicts their speed.

    `schedule` is the canonical one, see `targets.canonical_schedule`. Predictions are for `max_requests` full sequences of
    `max_len` positions. `on_stage` is called with the name of each stage.

    Returns:
        A dictionary that JSON can hold: `settings`, `versions`, `memory`, the passes `draft_step` and `canonical_pass`,
        `predicted` rates, and `splits`, the rates of each window of the same row budget; see `plan_table`.

    Raises `InputError` if the model does not fit (the message says what would), or a package is missing, see `compile_for`.
    """
    for name, value in (("max_requests", max_requests), ("max_len", max_len)):
        if not is_count(value):
            raise InputError(f"{name} must be an integer of at least 1, got {value!r}")
    params = param_shapes(cfg)
    page = schedule.numerics.page
    room = {"max_requests": max_requests, "max_len": max_len}
    sizes = {
        "weights_bytes": params_bytes(params),
        "cache_bytes": cache_bytes(cfg, **room, numerics=schedule.numerics),
        "row_bytes": -(-max_len // page) * cache_bytes(cfg, max_requests=1, max_len=page, numerics=schedule.numerics) // 2,
    }
    _check_fits(target, sizes, max_requests, needed=sizes["weights_bytes"] + sizes["cache_bytes"])
    state = jax.eval_shape(
        lambda: init_state(cfg, **room, max_stop_ids=MAX_STOP_IDS, max_logit_bias=MAX_LOGIT_BIAS, schedule=schedule)
    )
    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    recorded = int32((max_requests, max_len)), int32((max_requests,))
    decode = pass_work(cfg, schedule.fast(max_requests), windows=max_requests, context=max_len)
    verify = pass_work(cfg, schedule, windows=min(max_requests, schedule.budget.groups), context=max_len)
    passes = {}
    for name, fn, more, work in (("draft step", draft_step, (), decode), ("canonical pass", canonical_step, recorded, verify)):
        on_stage(f"compiling the {name} of {cfg.num_layers} layers for {target.name}")
        options = compiler_options(schedule.numerics, target.platform) if fn is canonical_step else {}
        program = _compile(target, sizes, max_requests, options, partial(fn, cfg, schedule), params, state, *more)
        passes[name.replace(" ", "_")] = _report(program, work, target)
    return {
        "settings": {
            "target": dataclasses.asdict(target),
            "model": {**config_to_json(cfg), "num_params": num_params(cfg)},
            "schedule": dataclasses.asdict(schedule),
            **room,
            "acceptance": ACCEPTANCE,
        },
        "versions": compilers(),
        "memory": {
            **sizes,
            "peak_bytes": max(report["peak_bytes"] for report in passes.values()),
            "usable_bytes": target.usable_bytes,
            "hbm_bytes": target.hbm_bytes,
        },
        **passes,
        **predict(cfg, target, schedule=schedule, live=max_requests, context=max_len),
    }


def draft_step(cfg: ModelConfig, schedule: Schedule, params: Params, state: GenState) -> GenState:
    """One step of ordinary decoding, which is also one token of the self draft."""
    return ordinary_step(params, cfg, state, schedule=schedule)


def canonical_step(
    cfg: ModelConfig, schedule: Schedule, params: Params, state: GenState, tokens: jax.Array, length: jax.Array
) -> GenState:
    """Verification and commit of drafts that are read from `tokens [B, max_len]`, `length [B]` of them each."""
    recorded = draft_fn(Drafter(RECORDED, (tokens, length)), schedule)
    return dvr_step(params, cfg, state, draft_fn=recorded, schedule=schedule)[0]


SecondsFn = Callable[[Schedule, int], float]  # (schedule of a pass, its windows that are not padding) -> its seconds


def predict(
    cfg: ModelConfig, target: Target, *, schedule: Schedule, live: int, context: int, seconds_fn: SecondsFn | None = None
) -> dict[str, Any]:
    """Tokens per second of `live` sequences of `context` positions each, if every pass takes its roofline time.

    `seconds_fn` says how long a pass takes; by default as long as one device of `target` needs at least.

    Returns:
        `predicted`: rates of ordinary decoding, canonical decoding (windows of one), prompt lookup of `LOOKUP_TOKENS` tokens a
        step, and drafting with the schedule's window; the `best_window` and `best_groups` for the same budget of rows.
        `splits`: rate and time of every window.
    """
    if seconds_fn is None:

        def seconds_fn(schedule: Schedule, windows: int) -> float:
            return pass_work(cfg, schedule, windows=windows, context=context).seconds(target)

    decode_s = seconds_fn(schedule.fast(live), live)
    splits = []
    for window in (1 << power for power in range(schedule.budget.rows.bit_length())):
        if schedule.budget.rows % window or window > context:
            continue
        split = schedule.with_budget(schedule.budget.rows, window)
        full, rest = divmod(live, split.budget.groups)
        passes = [split.budget.groups] * full + [rest] * (rest > 0)
        pass_s = sum(seconds_fn(split, windows) for windows in passes)
        step_s = (window - 1) * decode_s + pass_s
        tokens = live * sum(ACCEPTANCE**i for i in range(window))
        splits.append({"window": window, "groups": split.budget.groups, "step_ms": 1e3 * step_s, "tok_per_s": tokens / step_s})
    lookup = canonical_plans(live, schedule.budget.rows, Drafting("ngram", lookup_window(schedule)))[0].budget
    wide = schedule.with_budget(lookup.rows, lookup.window)
    lookup_s = -(-live // lookup.groups) * seconds_fn(wide, lookup.groups)
    rates = {split["window"]: split["tok_per_s"] for split in splits}
    best = max(splits, key=lambda split: split["tok_per_s"])
    return {
        "predicted": {
            "ordinary_tok_per_s": live / decode_s,
            "canonical_tok_per_s": rates[1],
            "lookup_tok_per_s": live * LOOKUP_TOKENS / lookup_s,
            "drafting_tok_per_s": rates[schedule.budget.window],
            "best_window": best["window"],
            "best_groups": best["groups"],
            "best_tok_per_s": best["tok_per_s"],
        },
        "splits": splits,
    }


def plan_table(result: dict[str, Any]) -> str:
    """The result of `plan` as text."""
    settings = result["settings"]
    memory = result["memory"]
    predicted = result["predicted"]
    target = settings["target"]
    numerics = settings["schedule"]["numerics"]
    budget = settings["schedule"]["budget"]
    lines = [
        f"{settings['model']['num_params'] / 1e9:.2f} B parameters, {settings['model']['dtype']}, on {target['name']}, "
        f"{target['device']}: {target['hbm_bytes'] / 1e9:.0f} GB at {target['bytes_per_s'] / 1e12:.2f} TB/s, "
        f"{target['flop_per_s'] / 1e12:.0f} TFLOP/s",
        f"{settings['max_requests']} requests of {settings['max_len']} positions; a canonical pass of "
        f"{budget['rows'] // budget['window']} x {budget['window']} rows; attention {numerics['implementation']!r}, "
        f"cache {numerics['cache_dtype']}",
        "",
        "memory, from the compiler",
        *(f"  {name:<26}{memory[f'{name}_bytes'] / 1e9:>9.2f} GB" for name in ("weights", "cache", "peak", "usable")),
        "",
        f"{'one pass':<18}{'GFLOP':>10}{'GB':>9}{'at least':>12}  {'bound by':<12}{'temporaries':>12}{'compiled in':>13}",
    ]
    for label, key in (("draft step", "draft_step"), ("canonical pass", "canonical_pass")):
        row = result[key]
        lines.append(
            f"  {label:<16}{row['flop'] / 1e9:>10,.0f}{row['bytes'] / 1e9:>9.2f}{row['least_ms']:>9.2f} ms  {row['bound']:<12}"
            f"{row['compiler']['temp_bytes'] / 1e6:>9,.0f} MB{row['compiler']['seconds']:>11.1f} s"
        )
    lines += [
        "",
        f"predicted from those times: sequences full, {settings['acceptance']:.0%} of drafted tokens accepted; nothing was run",
        f"  ordinary decoding         {predicted['ordinary_tok_per_s']:>9,.0f} tok/s",
        f"  canonical, windows of 1   {predicted['canonical_tok_per_s']:>9,.0f} tok/s",
        f"  prompt lookup             {predicted['lookup_tok_per_s']:>9,.0f} tok/s, if a step commits {LOOKUP_TOKENS:g} tokens",
        f"  drafting, windows of {budget['window']:<4} {predicted['drafting_tok_per_s']:>9,.0f} tok/s",
        f"  best split of {budget['rows']} rows: {predicted['best_groups']} windows of {predicted['best_window']}, "
        f"{predicted['best_tok_per_s']:,.0f} tok/s",
    ]
    return "\n".join(lines)


def _report(program: Compiled, work: Work, target: Target) -> dict[str, Any]:
    """One pass: its work, its least time, and the compiler's figures."""
    return {
        "flop": work.flop,
        "bytes": work.bytes,
        "least_ms": 1e3 * work.seconds(target),
        "bound": work.bound(target),
        "peak_bytes": program.peak_bytes,
        "compiler": program.numbers(),
    }


def _compile(
    target: Target, sizes: dict[str, int], max_requests: int, options: dict[str, Any], fn: Callable[..., Any], *args: Any
) -> Compiled:
    """`compile_for`, which here raises `InputError` if the program needs more memory than there is."""
    try:
        program = compile_for(target, fn, *args, donate=(1,), options=options)
    except jax.errors.JaxRuntimeError as error:
        found = OUT_OF_MEMORY.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
            raise
        needed, limit = (float(found[i]) * UNITS[found[i + 1]] for i in (1, 3))
        _check_fits(dataclasses.replace(target, usable_bytes=int(limit)), sizes, max_requests, needed=int(needed))
        raise
    _check_fits(target, sizes, max_requests, needed=program.peak_bytes)
    return program


def _check_fits(target: Target, sizes: dict[str, int], max_requests: int, *, needed: int) -> None:
    """Raises `InputError` if `needed` bytes are more than programs may use; the message says what would fit."""
    usable = target.usable_bytes
    weights = sizes["weights_bytes"]
    if needed <= usable:
        return
    said = f"needs {needed / 1e9:.1f} GB of {target.name}, whose programs may use {usable / 1e9:.1f} GB"
    if target.platform == "gpu":
        said += f" ({GPU_SHARE:.0%} of it, unless XLA_CLIENT_MEM_FRACTION is set)"
    if weights >= usable:
        devices = math.ceil(weights / usable)
        raise InputError(f"the model {said}: its weights alone take {weights / 1e9:.1f} GB, at least {devices} such devices")
    rows = max_requests - math.ceil((needed - usable) / sizes["row_bytes"])
    if rows < 1:
        raise InputError(f"the model {said}: not even one request of this length fits; lower max_len, or the rows of a pass")
    raise InputError(
        f"the model with {max_requests} requests {said}; {rows} requests of this length should fit: lower max_requests"
    )
