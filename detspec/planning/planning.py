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
from typing import Any

import jax

from detspec.cache import cache_bytes
from detspec.config import ModelConfig, is_count
from detspec.engine.policy import Drafting, canonical_plans, lookup_window
from detspec.errors import InputError
from detspec.model.dense import config_to_json
from detspec.model.params import num_params, param_shapes, params_bytes, pass_work
from detspec.planning.programs import PASSES, Deployment, compile_program, work_of
from detspec.schedule import Schedule
from detspec.target_compilers import Compiled, compilers
from detspec.targets import GPU_SHARE, Target

ACCEPTANCE = 0.99  # probability that a self-drafted token is accepted: LLM-42 and our own runs see this, rounded down
LOOKUP_TOKENS = 2.0  # tokens a step with prompt lookup, an assumption: published are 1.3 to 1.8 for chats, 3 to 5 for edits
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# The TPU compiler's messages about the device's memory, arguments included: "total memory required for HLO temporaries
# (28.06G) exceeds available HBM (15.75G)" or "Used 17.20G of 15.75G hbm". Messages about VMEM do not match.
OUT_OF_MEMORY = re.compile(
    r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT]?)(?:\) exceeds available HBM \(| of )([\d.]+)([KMGT]?)(?:\)| hbm)"
)


def plan(deployed: Deployment, *, on_stage: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Compiles the draft step and the canonical pass of `deployed` for one device, and predicts their speed.

    `on_stage` is called with the name of each stage.

    Returns:
        A dictionary that JSON can hold: `settings`, `versions`, `memory`, the passes `draft_step` and `canonical_pass`,
        `predicted` rates, and `splits`, the rates of each window of the same row budget; see `plan_table`.

    Raises `InputError` if the model does not fit (the message says what would), or a package is missing, see `compile_for`.
    """
    cfg, target, schedule, max_requests, max_len = deployed
    require_counts(**deployed.room)
    page = schedule.numerics.page
    sizes = {
        "weights_bytes": params_bytes(param_shapes(cfg)),
        "cache_bytes": cache_bytes(cfg, **deployed.room, numerics=schedule.numerics),
        "row_bytes": -(-max_len // page) * cache_bytes(cfg, max_requests=1, max_len=page, numerics=schedule.numerics) // 2,
    }
    _check_memory(deployed, sizes, needed=sizes["weights_bytes"] + sizes["cache_bytes"])
    passes: dict[str, dict[str, Any]] = {}
    for name in PASSES:
        on_stage(f"compiling the {name} of {cfg.num_layers} layers for {target.name}")
        program = _compiled(name, deployed, sizes)
        work = work_of(name, deployed)
        passes[name.replace(" ", "_")] = {
            "flop": work.flop,
            "bytes": work.bytes,
            "least_ms": 1e3 * work.seconds(target),
            "bound": work.bound(target),
            "peak_bytes": program.peak_bytes,
            "compiler": program.numbers(),
        }
    return {
        "settings": settings_of(deployed),
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


def require_counts(**values: object) -> None:
    """Raises `InputError` unless all `values` are positive integers."""
    for name, value in values.items():
        if not is_count(value):
            raise InputError(f"{name} must be an integer of at least 1, got {value!r}")


def settings_of(deployed: Deployment, **more: int) -> dict[str, Any]:
    """The load and `more` numbers that were asked for, as JSON can hold them."""
    return {
        "target": dataclasses.asdict(deployed.target),
        "model": {**config_to_json(deployed.cfg), "num_params": num_params(deployed.cfg)},
        "schedule": dataclasses.asdict(deployed.schedule),
        **deployed.room,
        **more,
        "acceptance": ACCEPTANCE,
    }


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


def _compiled(name: str, deployed: Deployment, sizes: dict[str, int]) -> Compiled:
    """`compile_program` for one device, which here raises `InputError` if the program needs more memory than there is."""
    try:
        program = compile_program(name, deployed, 1)
    except jax.errors.JaxRuntimeError as error:
        found = OUT_OF_MEMORY.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
            raise
        needed, limit = (float(found[i]) * UNITS[found[i + 1]] for i in (1, 3))
        limited = dataclasses.replace(deployed.target, usable_bytes=int(limit))
        _check_memory(deployed._replace(target=limited), sizes, needed=int(needed))
        raise
    _check_memory(deployed, sizes, needed=program.peak_bytes)
    return program


def _check_memory(deployed: Deployment, sizes: dict[str, int], *, needed: int) -> None:
    """Raises `InputError` if `needed` bytes are more than programs may use; the message says what would fit."""
    target = deployed.target
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
    rows = deployed.max_requests - math.ceil((needed - usable) / sizes["row_bytes"])
    if rows < 1:
        raise InputError(f"the model {said}: not even one request of this length fits; lower max_len, or the rows of a pass")
    raise InputError(
        f"the model with {deployed.max_requests} requests {said}; {rows} requests of this length should fit: lower max_requests"
    )
