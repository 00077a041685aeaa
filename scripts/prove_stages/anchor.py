"""Bits of canonical passes in one process and in another, neither of which finds what the other compiled and tuned."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.bench.bench import random_model
from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.held import Jitted
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.schedule import Schedule
from detspec.state import Windows
from prove_stages.ceilings import random
from prove_stages.examine import digest_of
from prove_stages.journal import Entry
from prove_stages.passes import label, measured_schedules, new_cache, shapes_of, windows_of
from prove_stages.programs import Measurement, Program, Setting

STAGE = "doctor again"
FIRST = "one process"
CONTROL = "native"  # reductions of ordinary steps, which promise nothing
DIFFERS = "control: XLA's products give other bits than pinned ones"


def programs(setting: Setting) -> Iterator[Program]:
    """Each pass, with all its logits."""
    cfg = setting.size.model
    for schedule in schedules(setting):
        static = {"cfg": cfg, "schedule": schedule}
        yield Program(label(cfg, schedule), one_pass, partial(shapes_of, setting, cfg, schedule), static=static)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Measures in each process."""
    yield Measurement(FIRST, partial(find, setting), apart=True)
    yield Measurement("another process", partial(compare, setting))


def schedules(setting: Setting) -> list[Schedule]:
    """A step with XLA's products, a canonical pass, and a canonical step of as many rows.

    Pinned products would hide from rounded numbers that the sums of a step are XLA's.
    """
    rows, step_rows = setting.size.compared
    step, *canonical = measured_schedules(setting, (step_rows,), (rows,))
    return [step.with_numerics(linear="xla"), *canonical]


def find(setting: Setting) -> Iterator[Entry]:
    """The bits that this process finds; where products are pinned, those of the step must be others.

    In a rehearsal they need not: rows are so short that a CPU adds them in one order.
    """
    found = list(bits_here(setting))
    for schedule, bits in found:
        yield Entry(name_of(setting, schedule), float(schedule.budget.rows), "rows", note=bits)
    (_, of_step), _, (canonical, bits) = found
    bar = setting.bar(1.0) if canonical.numerics.linear == "pinned" else None
    yield Entry(DIFFERS, float(of_step != bits), "yes or no", bar, note=f"{of_step}, pinned {bits}")


def compare(setting: Setting) -> Iterator[Entry]:
    """Whether they are those of the first process; of a step that promises nothing, for comparison.

    Raises `RuntimeError` where the first process found none: that is no difference of bits.
    """
    found = {name: str(entry["note"]) for name, entry in setting.earlier.get(STAGE, {}).items()}
    for schedule in schedules(setting):
        if name_of(setting, schedule) not in found:
            raise RuntimeError(f"the first process found no {name_of(setting, schedule)}")
    for schedule, bits in bits_here(setting):
        name = name_of(setting, schedule)
        there = found[name]
        bar = None if schedule.numerics.reductions == CONTROL else 1.0
        note = f"{bits}, there {there}"
        yield Entry(f"{name} in both processes", float(bits == there), "yes or no", bar, note=note)


def name_of(setting: Setting, schedule: Schedule) -> str:
    """Names the bits of a pass."""
    products = " with XLA's products" if schedule.numerics.reductions == CONTROL else ""
    return f"bits of a {label(setting.size.model, schedule)}{products}"


def bits_here(setting: Setting) -> Iterator[tuple[Schedule, str]]:
    """A digest of the logits of each pass."""
    cfg = setting.size.model
    params = random_model(cfg).params
    for schedule in schedules(setting):
        cache = jax.tree.map(filled, new_cache(setting, cfg))
        logits = one_pass(params, windows_of(setting, schedule), cache, cfg=cfg, schedule=schedule)
        yield schedule, digest_of(np.asarray(logits))


def filled(leaf: jax.Array) -> jax.Array:
    """Random keys and values, so that attention adds up something; page tables stay as they are."""
    return random(leaf.shape).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@partial(Jitted, static_argnames=("cfg", "schedule"))
def one_pass(params: Params, windows: Windows, cache: KVCache, *, cfg: ModelConfig, schedule: Schedule) -> jax.Array:
    """Runs a pass: all its logits."""
    logits, _, _ = forward(params, cfg, windows, cache, numerics=schedule.numerics)
    return logits
