"""`detspec plan --chips N`: memory, exchanges and speed of a model on several chips that are not here, by their number.

1. Its programs are compiled for `N` chips with 2 and with 4 layers. Layers are alike, so memory and collectives of all layers
   follow: each further layer adds half of the difference. For smaller numbers of chips, one program with 2 layers is compiled,
   the canonical pass, which needs most; what each further layer adds to its temporaries is taken from `N` chips.
2. The collectives that the optimised programs have must be those of `exchanges.gathers`.
3. A pass takes between max(t, c) and t + c, where t are the seconds of its bytes and operations on one chip, and c those of its
   collectives: everything at the same time, or one after the other. Rates follow as on one chip.
4. The same is worked out for the layout that adds partial sums across chips, which nothing here runs.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from detspec.cache import cache_bytes
from detspec.config import ModelConfig
from detspec.mesh import check_fits, fitting_chips, kv_parts, param_specs
from detspec.model.params import param_shapes, pass_work
from detspec.planning.exchanges import Exchange, Exchanges, added_floats, as_gathers, exchange_seconds, found_in, gathers, sums
from detspec.planning.planning import predict, require_counts, settings_of
from detspec.planning.programs import PASSES, Deployment, compile_program, expected, work_of
from detspec.roofline import check_devices, links_of
from detspec.schedule import Schedule
from detspec.target_compilers import compilers
from detspec.targets import Target

DEPTHS = (2, 4)  # layers of the programs that are compiled
LAYOUTS = {"gather": gathers, "psum": sums}
GAUGES = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes")


def plan_chips(deployed: Deployment, chips: int, *, on_stage: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Compiles the programs of `deployed` for each number of chips up to `chips`, and predicts memory and speed of each.

    `on_stage` is called with the name of each stage, of which there are `num_stages`.

    Returns:
        A dictionary that JSON can hold: `settings`, `versions`, the passes `draft_step` and `canonical_pass` on `chips`,
        `numbers`, a list with `memory` and `predicted` rates of each number of chips, and `best`, which of them serve this
        load best; see `mesh_table`.

    Raises `InputError` if the model cannot be cut over `chips`, the target has fewer, or a package is missing.
    """
    require_counts(chips=chips, **deployed.room)
    cfg = deployed.cfg
    target = deployed.target
    check_devices(target, chips)
    depths = _depths(cfg)
    smaller = numbers_of_chips(cfg, chips)[:-1]
    asked: dict[str, Shallow] = {}
    for name in PASSES:
        on_stage(f"compiling the {name} on {chips} of {target.name}")
        asked[name] = _compiled(name, deployed, chips, depths)
    whole = {name: found.with_layers(cfg.num_layers) for name, found in asked.items()}
    added = whole["canonical pass"]["temp_bytes"] - asked["canonical pass"].counts[0]["temp_bytes"]
    numbers = []
    for number in smaller:
        on_stage(f"compiling the canonical pass on {number} of {target.name}")
        sizes = _sizes(deployed, number)
        needed = sum(sizes.values())
        if needed <= target.usable_bytes:
            found = _compiled("canonical pass", deployed, number, depths[:1]).counts[0]
            needed += found["temp_bytes"] + found["code_bytes"] + added
        numbers.append(_of_number(deployed, number, {**sizes, "peak_bytes": needed}))
    passes = {name.replace(" ", "_"): _pass(name, deployed, chips, whole[name], asked[name].seconds) for name in PASSES}
    peak = max(found["peak_bytes"] for found in passes.values())
    numbers.append(_of_number(deployed, chips, {**_sizes(deployed, chips), "peak_bytes": peak}))
    return {
        "settings": {**settings_of(deployed, chips=chips), "depths": list(depths)},
        "versions": compilers(),
        **passes,
        "numbers": numbers,
        "best": _best(numbers),
    }


def numbers_of_chips(cfg: ModelConfig, chips: int) -> list[int]:
    """The numbers that are compared: powers of two up to `chips` that divide the model, and `chips`.

    Raises `InputError` if `chips` does not divide the model.
    """
    check_fits(cfg, chips)
    return [n for n in fitting_chips(cfg) if n == chips or (n < chips and n & (n - 1) == 0)]


def num_stages(cfg: ModelConfig, chips: int) -> int:
    """How many stages `plan_chips` names."""
    return len(PASSES) + len(numbers_of_chips(cfg, chips)) - 1


def _depths(cfg: ModelConfig) -> tuple[int, ...]:
    """The layers of the programs that are compiled: all of a shallow model, and of one whose thoughts name layers."""
    return DEPTHS if cfg.num_layers > DEPTHS[-1] and cfg.thinking is None else (cfg.num_layers,)


class Shallow(NamedTuple):
    """Figures of a program with few layers, or of two such programs."""

    depths: tuple[int, ...]
    counts: list[Counter[Any]]  # for each program: bytes on a chip, by names of GAUGES, and exchanges
    seconds: float  # time to compile all of them

    def with_layers(self, layers: int) -> Counter[Any]:
        """The figures with `layers` in all: each further layer adds what one layer adds between the two depths."""
        first = self.counts[0]
        last = self.counts[-1]
        between = max(1, self.depths[-1] - self.depths[0])
        more = layers - self.depths[0]
        return Counter({name: first[name] + (last[name] - first[name]) * more // between for name in first | last})


def _compiled(name: str, deployed: Deployment, chips: int, depths: tuple[int, ...]) -> Shallow:
    """Compiles a program with each of `depths`."""
    counts = []
    seconds = 0.0
    for depth in depths:
        shallow = deployed.cfg.with_layers(depth)
        program = compile_program(name, deployed._replace(cfg=shallow), chips)
        counts.append(Counter[Any]({gauge: getattr(program, gauge) for gauge in GAUGES}))
        counts[-1].update(found_in(program.hlo))
        seconds += program.seconds
    return Shallow(depths, counts, seconds)


def _sizes(deployed: Deployment, chips: int) -> dict[str, float]:
    """Bytes of weights and cache on each of `chips`."""
    cfg = deployed.cfg
    kv = kv_parts(cfg, chips)
    parts = {"kv": kv, "query": chips // kv}

    def own_bytes(leaf: Any, spec: Any) -> float:
        axes = [axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)]
        return leaf.size * leaf.dtype.itemsize / math.prod(parts[axis] for axis in axes)

    params = param_shapes(cfg)
    specs = jax.tree.broadcast(param_specs(cfg), params)  # a matrix in int8 has two arrays
    weights_bytes = sum(jax.tree.leaves(jax.tree.map(own_bytes, params, specs)))
    return {
        "weights_bytes": weights_bytes,
        "cache_bytes": cache_bytes(cfg, **deployed.room, numerics=deployed.schedule.numerics) / kv,
    }


def pass_seconds(own_s: float, cfg: ModelConfig, target: Target, chips: int, rows: int, layout: str) -> tuple[float, float]:
    """Seconds of a pass if the chips exchange values while they work, and if they do so in turn; `own_s` is their work."""
    if chips == 1:
        return own_s, own_s
    shared_s = exchange_seconds(LAYOUTS[layout](cfg, rows, chips), links_of(target, chips))
    return max(own_s, shared_s), own_s + shared_s


def _pass(name: str, deployed: Deployment, chips: int, found: Counter[Any], compiled_s: float) -> dict[str, Any]:
    """Describes a pass: its work on each chip, its collectives, its seconds, and the compiler's figures."""
    work = work_of(name, deployed, chips)
    own_s = work.seconds(deployed.target)
    ours, others = (
        pass_seconds(own_s, deployed.cfg, deployed.target, chips, deployed.rows(name), layout) for layout in LAYOUTS
    )
    exchanges = Counter({key: count for key, count in found.items() if isinstance(key, Exchange)})
    by_formula: Exchanges = Counter() if chips == 1 else expected(name, deployed, chips)
    return {
        "flop": work.flop,
        "bytes": work.bytes,
        "chip_ms": 1e3 * own_s,
        "exchange_ms": 1e3 * (ours[1] - own_s),
        "at_once_ms": 1e3 * ours[0],
        "in_turn_ms": 1e3 * ours[1],
        "over_psum": [own / other for own, other in zip(ours, others, strict=True)],
        "exchanges": [
            {**exchange._asdict(), "count": count, "received_bytes": count * exchange.received_bytes}
            for exchange, count in exchanges.items()
        ],
        "equals_formula": as_gathers(exchanges, by_formula) == by_formula,
        "added_floats": len(added_floats(exchanges)),
        "peak_bytes": sum(found[gauge] for gauge in GAUGES) - 2 * found["alias_bytes"],
        "compiler": {**{gauge: found[gauge] for gauge in GAUGES}, "seconds": compiled_s},
    }


def _of_number(deployed: Deployment, chips: int, memory: dict[str, float]) -> dict[str, Any]:
    """Memory and rates on `chips`: at once, then in turn."""
    cfg, target, schedule, live, context = deployed

    @functools.cache
    def own_seconds(schedule: Schedule, windows: int) -> float:
        return pass_work(cfg, schedule, windows=windows, context=context, chips=chips).seconds(target)

    def rates(layout: str, end: int) -> dict[str, Any]:
        def seconds_fn(schedule: Schedule, windows: int) -> float:
            own_s = own_seconds(schedule, windows)
            return pass_seconds(own_s, cfg, target, chips, schedule.budget.rows, layout)[end]

        return predict(cfg, target, schedule=schedule, live=live, context=context, seconds_fn=seconds_fn)["predicted"]

    return {
        "chips": chips,
        "memory": {**memory, "usable_bytes": target.usable_bytes},
        "fits": memory["peak_bytes"] <= target.usable_bytes,
        "predicted": {layout: [rates(layout, end) for end in (0, 1)] for layout in LAYOUTS},
    }


def _best(numbers: list[dict[str, Any]]) -> dict[str, int | None]:
    """The number of chips with most tokens per second, and with most of them per chip, if nothing overlaps."""
    fitting = [found for found in numbers if found["fits"]]

    def rate(found: dict[str, Any]) -> float:
        return found["predicted"]["gather"][1]["best_tok_per_s"]

    if not fitting:
        return {"tok_per_s": None, "tok_per_s_per_chip": None}
    return {
        "tok_per_s": max(fitting, key=rate)["chips"],
        "tok_per_s_per_chip": max(fitting, key=lambda found: rate(found) / found["chips"])["chips"],
    }
