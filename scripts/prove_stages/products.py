"""Products with weights by rows: pinned, the library's, and int8, whose sums are exact in any order."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.roofline import Work
from prove_stages.journal import Entry
from prove_stages.kernels import product
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import in_turns, ratio, typical

LEAST_OF_LIBRARY = 1 / 1.15
LEAST_OVER_BFLOAT16 = 1.5
CHECKED = 16  # outputs of an int8 product that are added up again, exactly


def programs(setting: Setting) -> Iterator[Program]:
    """All three at every number of rows."""
    for rows in setting.size.product_rows:
        yield from contest(setting, rows).values()


def measurements(setting: Setting) -> Iterator[Measurement]:
    """One for each number of rows."""
    for rows in setting.size.product_rows:
        yield Measurement(f"{rows} rows", partial(measure, setting, rows))


def measure(setting: Setting, rows: int) -> Iterator[Entry]:
    """Times of one number of rows, and whether int8 is exact; int8 last, since not every library has it at every size."""
    kinds = contest(setting, rows)
    library = kinds["library"].call()
    samples = in_turns({"pinned": kinds["pinned"].call(), "library": library}, setting.size)
    seconds = typical(samples, "pinned")
    work = kinds["pinned"].work
    bound = setting.bound(work)
    rate = f"{work.flop / seconds / 1e12:.1f} TFLOP/s, {work.bytes / seconds / 1e12:.2f} TB/s"
    yield Entry(f"pinned, {rows} rows", 1e6 * seconds, "us", bound=bound, note=rate, predicted=setting.predicted(work, 1e6))
    yield Entry(
        f"pinned, {rows} rows, of the library's speed",
        ratio(samples, "library", "pinned"),
        "",
        setting.bar(LEAST_OF_LIBRARY),
        bound=bound,
        predicted=setting.predicted_ratio(kinds["library"].work, work),
    )
    samples = in_turns({"int8": kinds["int8"].call(), "library": library}, setting.size)
    yield Entry(
        f"int8, {rows} rows, of bfloat16's speed",
        ratio(samples, "library", "int8"),
        "",
        setting.bar(LEAST_OVER_BFLOAT16),
        bound=bound,
        predicted=setting.predicted_ratio(kinds["library"].work, kinds["int8"].work),
    )
    yield Entry(f"int8, {rows} rows, exact", float(is_exact(kinds["int8"])), "yes or no", 1.0)


def contest(setting: Setting, rows: int) -> dict[str, Program]:
    """The down projection of `rows` rows, three ways."""
    return {"pinned": product(setting, rows), "int8": int8_product(setting, rows), "library": product(setting, rows, "xla")}


def int8_product(setting: Setting, rows: int) -> Program:
    """The same product of int8 with int32 sums."""
    cfg = setting.size.cfg

    def make() -> tuple[jax.Array, jax.Array]:
        shapes = ((rows, cfg.d_ff), (cfg.d_model, cfg.d_ff))
        x, weight = (jax.random.randint(jax.random.key(n), shape, -127, 128, jnp.int8) for n, shape in enumerate(shapes))
        return x, weight

    def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)

    # An operation in int8 counts half: GPUs and newer TPUs do twice as many a second.
    work = Work(float((rows + cfg.d_model) * cfg.d_ff + 4 * rows * cfg.d_model), 1.0 * rows * cfg.d_ff * cfg.d_model)
    return Program(f"product, int8, {rows} x {cfg.d_ff} x {cfg.d_model}", multiply, make, work=work, calls=50)


def is_exact(program: Program) -> bool:
    """Whether the first outputs of all rows are the sums of int64."""
    x, weight = jax.jit(program.make)()
    found = np.asarray(jax.jit(program.fn)(x, weight))[:, :CHECKED]
    return bool((found == np.asarray(x, np.int64) @ np.asarray(weight, np.int64)[:CHECKED].T).all())
