"""The doctor on four layers: each axis that must not matter, and which budgets and splits have the anchor's bits."""

import hashlib
from collections.abc import Callable, Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.bench.bench import random_model
from detspec.cache import init_cache
from detspec.checkpoint.load import Model
from detspec.doctor.examination import NUM_SEQUENCES, PassResult, examine, examine_budgets, run_pass, text_length
from detspec.model.params import param_shapes
from detspec.sampling_params import SamplingParams, sampling_arrays
from detspec.schedule import Budget, Schedule
from detspec.state import Windows
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting

CONTROL_BATCHES = (1, 2, 4, 16)  # of the inverse control in `detspec.doctor.examination`
DIGITS = 16  # of a digest that is shown


def programs(setting: Setting) -> Iterator[Program]:
    """Passes of every budget, and of the inverse control."""
    schedule = schedule_of(setting)
    for budget in dict.fromkeys([schedule.budget, *row_budgets(setting), *split_budgets(setting)]):
        yield pass_program(setting, schedule.with_budget(budget.rows, budget.window), calls=10)
    for batch in CONTROL_BATCHES:
        yield pass_program(setting, schedule_of(setting).fast(batch), calls=200)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Rows, splits, and all that a doctor varies."""
    model = cache(partial(random_model, setting.size.examined))
    for name, budgets in (("rows", row_budgets(setting)), ("splits", split_budgets(setting))):
        yield Measurement(name, partial(compare_budgets, model, schedule_of(setting), name, budgets))
    yield Measurement("axes", lambda: examine_axes(model(), schedule_of(setting)))


def compare_budgets(model: Callable[[], Model], schedule: Schedule, name: str, budgets: list[Budget]) -> Iterator[Entry]:
    """Whether each budget has the bits of the schedule's own; no bar, because an engine certifies what it uses.

    The anchor's pass is run again for each of them, so that each is known before the next one is compiled or run.
    """
    equal: list[str] = []
    for number, budget in enumerate(budgets, 1):
        anchor, differences = examine_budgets(model(), schedule, [budget])
        if name == "rows":
            yield Entry("bits of the anchor", float(schedule.budget.rows), "rows", note=digest(anchor))
        label = f"{budget.rows}" if name == "rows" else f"{budget.groups}x{budget.window}"
        differs = differences[budget]
        equal += [] if differs else [label]
        title = f"{label} rows" if name == "rows" else label
        yield Entry(f"{title} as {schedule.budget.rows} rows", float(not differs), "yes or no", note=differs)
        so_far = [] if number == len(budgets) else [f"{number} of {len(budgets)} so far"]
        yield Entry(f"{name} with equal bits", len(equal) / number, "of all", note="; ".join([", ".join(equal), *so_far]))


def examine_axes(model: Model, schedule: Schedule) -> Iterator[Entry]:
    """Checks what must not matter, and the inverse control, which must find a difference."""
    checks, control = examine(model, schedule)
    for check in checks:
        note = check.differs or f"{check.num_variants} variants"
        yield Entry(f"{check.axis} does not matter", float(check.equal), "yes or no", 1.0, note=note)
    yield Entry("the fast path differs", float(not control.equal), "yes or no", 1.0, note=control.differs or control.meaning)


def digest(result: PassResult) -> str:
    """The first digits of SHA-256 over keys, values and logits."""
    return digest_of(*result.held.values(), result.logits)


def digest_of(*arrays: np.ndarray) -> str:
    """The first digits of SHA-256 over the bytes of all arrays."""
    content = hashlib.sha256()
    for array in arrays:
        content.update(np.ascontiguousarray(array).view(np.uint8))
    return content.hexdigest()[:DIGITS]


def schedule_of(setting: Setting) -> Schedule:
    """The schedule that is examined; the anchor's rows are its budget's."""
    schedule = setting.schedule_fn(setting.size.examined)
    budget = setting.size.examined_budget
    return schedule if budget is None else schedule.with_budget(*budget)


def row_budgets(setting: Setting) -> list[Budget]:
    """Other numbers of rows, in windows of the schedule's length where they fill one."""
    own = schedule_of(setting).budget
    return [Budget(rows, min(rows, own.window)) for rows in setting.size.examined_rows if rows != own.rows]


def split_budgets(setting: Setting) -> list[Budget]:
    """Budgets that cut the same rows into other windows."""
    rows = schedule_of(setting).budget.rows
    window = schedule_of(setting).budget.window
    return [Budget(rows, 1 << power) for power in range(rows.bit_length()) if 1 << power != window]


def pass_program(setting: Setting, schedule: Schedule, calls: int) -> Program:
    """The doctor's pass of one budget, as shapes."""
    cfg = setting.size.examined
    own = schedule_of(setting)
    G, W = schedule.budget.groups, schedule.budget.window
    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def make() -> tuple:
        windows = Windows(tokens=int32((G, W)), sequence=int32((G,)), start=int32((G,)), count=int32((G,)))
        room = {"max_requests": NUM_SEQUENCES, "max_len": text_length(cfg, own), "numerics": own.numerics}
        state = jax.eval_shape(partial(init_cache, cfg, **room))
        sampling = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, sampling_arrays([SamplingParams(top_k=50)])))
        return param_shapes(cfg), cfg, windows, state, sampling

    kind = "fast" if schedule.numerics.reductions == "native" else "pass"
    return Program(f"{kind} {G}x{W}", run_pass, make, static={"schedule": schedule}, calls=calls)
