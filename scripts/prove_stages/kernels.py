"""Every kernel at named shapes against float64, with nan or large numbers wherever nothing may be read."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from kernel_shapes import AttentionShape

from detspec.ops.linear.api import linear_fn
from detspec.roofline import Work
from detspec.schedule import Schedule
from prove_stages.ceilings import random
from prove_stages.journal import Entry
from prove_stages.paged import attention_program, attention_shape, exact, schedule_of
from prove_stages.programs import Measurement, Program, Setting

LARGEST_ERROR = 1e-2  # of bfloat16 operands with sums in float32; measured elsewhere as 1e-3 to 1e-2
SIMULATED = ("pallas_tpu", "pallas_gpu")  # in a rehearsal without these devices


def programs(setting: Setting) -> Iterator[Program]:
    """Attention at its shapes, and pinned products."""
    for shape, schedule in attentions(setting):
        yield attention_program(shape, schedule, poisoned=True, calls=1)
    for rows in setting.size.checked_rows:
        yield product(setting, rows)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Checks each shape, then compares the bits of products of all numbers of rows."""
    for shape, schedule in attentions(setting):
        yield Measurement(label(shape, schedule), partial(check_attention, shape, schedule))
    for rows in setting.size.checked_rows:
        yield Measurement(f"pinned {rows}", partial(check_product, setting, rows))
    yield Measurement("rows of a product", partial(compare_rows, setting))


def attentions(setting: Setting) -> Iterator[tuple[AttentionShape, Schedule]]:
    """The shapes with their schedules; a rehearsal on a CPU simulates kernels of other devices at the first of them."""
    shapes = [attention_shape(layer, *sizes, decode=decode) for layer, *sizes, decode in setting.size.kernels]
    for shape in shapes:
        yield shape, schedule_of(shape, setting)
    if setting.platform == "cpu":
        for name in SIMULATED:
            page = 64 if name == "pallas_gpu" else 16
            schedule = schedule_of(shapes[0], setting)
            yield shapes[0], schedule.with_numerics(implementation=name, page=page, cache_dtype="bfloat16", interpret=True)


def label(shape: AttentionShape, schedule: Schedule) -> str:
    """The name of a shape, and of a kernel that is simulated."""
    return f"{shape.name}, {schedule.numerics.implementation} simulated" if schedule.numerics.interpret else shape.name


def check_attention(shape: AttentionShape, schedule: Schedule) -> Iterator[Entry]:
    """The error of one attention, in memory that held nan before."""
    program = attention_program(shape, schedule, poisoned=True)
    args = jax.jit(program.make)()
    shapes = jax.eval_shape(program.fn, *args)
    poison_memory(shapes)
    found = np.asarray(program.jitted(*args))
    expected = exact(shape, schedule, args)
    used = np.isfinite(expected)
    note = "all finite" if np.isfinite(found).all() else f"{np.sum(~np.isfinite(found))} numbers are not finite"
    yield Entry(label(shape, schedule), error_of(found, expected, used), "relative error", LARGEST_ERROR, True, note=note)


def check_product(setting: Setting, rows: int) -> Iterator[Entry]:
    """The error of a pinned product."""
    program = product(setting, rows)
    x, weight = jax.jit(program.make)()
    poison_memory(jax.eval_shape(program.fn, x, weight))
    found = np.asarray(program.jitted(x, weight))
    expected = np.asarray(x.astype(jnp.float32), np.float64) @ np.asarray(weight.astype(jnp.float32), np.float64).T
    yield Entry(program.name, error_of(found, expected, np.isfinite(expected)), "relative error", LARGEST_ERROR, True)


def compare_rows(setting: Setting) -> Iterator[Entry]:
    """Whether the first row has the same bits among any number of rows: pinned it must, XLA's need not.

    XLA's are compiled as in canonical passes, and as XLA itself would.
    """
    largest = max(setting.size.checked_rows)
    x, weight = jax.jit(product(setting, largest).make)()
    own = product(setting, largest, "xla")
    products = {"pinned": product(setting, largest), "xla": own, "xla left alone": dataclasses.replace(own, numerics=None)}
    for linear, program in products.items():
        multiply = program.jitted
        firsts = {rows: np.asarray(multiply(x[:rows], weight))[0].view(np.uint32) for rows in setting.size.checked_rows}
        same = [rows for rows, first in firsts.items() if (first == firsts[largest]).all()]
        bar = 1.0 if linear == "pinned" else None
        note = f"as among {largest}: {', '.join(map(str, same))} rows"
        yield Entry(f"bits of a row, {linear}", float(len(same) == len(firsts)), "yes or no", bar, note=note)


def product(setting: Setting, rows: int, linear: str = "pinned") -> Program:
    """The down projection of `rows` rows."""
    cfg = setting.size.cfg
    ff = cfg.layer(0).ff
    schedule = setting.schedule_fn(cfg).with_numerics(linear=linear)
    work = Work(2.0 * (rows + cfg.d_model) * ff.d_ff + 4.0 * rows * cfg.d_model, 2.0 * rows * ff.d_ff * cfg.d_model)
    return Program(
        f"product, {linear}, {rows} x {ff.d_ff} x {cfg.d_model}",
        linear_fn(schedule.numerics),
        lambda: (random((rows, ff.d_ff)), random((cfg.d_model, ff.d_ff), 1)),
        numerics=schedule.numerics,
        work=work,
        calls=50,
    )


def poison_memory(shapes: jax.ShapeDtypeStruct) -> None:
    """Fills memory as large as the result with nan, and gives it back: what a kernel does not write stays nan."""
    jax.block_until_ready(jnp.full(shapes.shape, np.nan, shapes.dtype)).delete()


def error_of(found: np.ndarray, expected: np.ndarray, used: np.ndarray) -> float:
    """||found - expected|| / ||expected|| where `used`; nan if anything found is not finite."""
    if not np.isfinite(found).all():
        return float("nan")
    return float(np.linalg.norm((found - expected)[used]) / np.linalg.norm(expected[used]))
