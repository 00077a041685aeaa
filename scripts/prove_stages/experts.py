"""Products with the weights of experts, in layers of published shapes: values, bits of a row, time against bytes of weights.

A program runs several layers one after the other: gate and up, which share their rows, the activation, and down, whose rows
are each choice's own. Rows choose experts at random, and others in each layer.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.ops.experts.api import experts_fn
from detspec.ops.linear.api import linear_fn
from detspec.roofline import Work
from detspec.schedule import Numerics
from prove_stages.ceilings import random
from prove_stages.journal import Entry
from prove_stages.kernels import LARGEST_ERROR, error_of, poison_memory
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.sizes import Experts
from prove_stages.timing import in_turns, typical

MOST_OF_READING = 1.15  # time over that of reading the weights of all chosen experts once
LAYERS = 4
CHECKED = 2  # rows that are compared with float64


def programs(setting: Setting) -> Iterator[Program]:
    """The layers of every model at every number of rows, and what is checked."""
    for size in setting.size.experts:
        yield product(setting, size)
        for rows in setting.size.experts_rows:
            yield layers(setting, size, rows)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Checks each model, then times its layers."""
    for size in setting.size.experts:
        yield Measurement(f"{size.name}, values", partial(check_values, setting, size))
        yield Measurement(f"{size.name}, bits", partial(compare_bits, setting, size))
        for rows in setting.size.experts_rows:
            yield Measurement(f"{size.name}, {rows} rows", partial(measure, setting, size, rows))


def measure(setting: Setting, size: Experts, rows: int) -> Iterator[Entry]:
    """The time of a layer, and over the time that reading its experts takes at the bandwidth of a copy."""
    program = layers(setting, size, rows)
    seconds = typical(in_turns({"layer": program.call()}, setting.size), "layer") / LAYERS
    read = Work(bytes_read(size, rows), 0.0)
    name = f"layer of {size.name}, {rows} rows"
    rate = f"{read.bytes / seconds / 1e12:.2f} TB/s of weights, {num_chosen(size, rows)} experts"
    bound = setting.bound(Work(program.work.bytes / LAYERS, program.work.flop / LAYERS))
    yield Entry(name, 1e6 * seconds, "us", bound=bound, note=rate, predicted=setting.predicted(program.work, 1e6 / LAYERS))
    reading_s = setting.predicted_s(read)
    if reading_s is not None:
        bar = setting.bar(MOST_OF_READING) if rows > 1 else None
        yield Entry(f"{name}, over reading its weights", seconds / reading_s, "", bar, True, bound=bound, predicted=1.0)


def check_values(setting: Setting, size: Experts) -> Iterator[Entry]:
    """The error of one product of all rows, in memory that held nan before."""
    program = product(setting, size)
    x, ids, weight = jax.jit(program.make)()
    poison_memory(jax.eval_shape(program.fn, x, ids, weight))
    found = np.asarray(program.jitted(x, ids, weight))[:CHECKED]
    own = np.asarray(jax.jit(lambda weight, ids: weight[ids])(weight, ids[:CHECKED]).astype(jnp.float32))
    expected = np.einsum("ri,rkoi->rko", np.asarray(x[:CHECKED], np.float64), own.astype(np.float64))
    error = error_of(found, expected, np.isfinite(expected))
    yield Entry(f"values of {size.name}", error, "relative error", LARGEST_ERROR, True)


def compare_bits(setting: Setting, size: Experts) -> Iterator[Entry]:
    """Whether rows keep their bits alone, among others, shuffled, and where all others choose one expert.

    They are compared with pinned products of the row with its experts' matrices, too. The control is another row's bits.
    """
    program = product(setting, size)
    multiply = program.jitted
    x, ids, weight = jax.jit(program.make)()
    rows = x.shape[0]
    whole = bits(multiply(x, ids, weight))
    for fewer in (1, rows // 8):
        same = (bits(multiply(x[:fewer], ids[:fewer], weight)) == whole[:fewer]).all()
        yield _yes(f"{size.name}: bits of the first {fewer} as among {rows} rows", same)
    order = np.random.default_rng(0).permutation(rows)
    yield _yes(f"{size.name}: bits of shuffled rows", (bits(multiply(x[order], ids[order], weight)) == whole[order]).all())
    crowd = jnp.where(jnp.arange(rows)[:, None] == 0, ids, ids[0])
    yield _yes(
        f"{size.name}: bits of a row where all choose its experts", (bits(multiply(x, crowd, weight))[0] == whole[0]).all()
    )
    none = jnp.where(jnp.arange(rows)[:, None] == 0, ids, size.num)
    alone = bits(multiply(x, none, weight))
    yield _yes(f"{size.name}: bits of a row where no other has experts", (alone[0] == whole[0]).all() and not alone[1:].any())
    pinned = jax.jit(linear_fn(program.numerics))
    ranks = [(bits(pinned(x[:1], weight[expert]))[0] == whole[0, rank]).all() for rank, expert in enumerate(np.asarray(ids[0]))]
    yield _yes(f"{size.name}: bits of pinned products", all(ranks))
    yield _yes(f"{size.name}: another row has other bits", (whole[0] != whole[1]).any())


def layers(setting: Setting, size: Experts, rows: int) -> Program:
    """LAYERS layers of experts, one after the other."""
    numerics = numerics_of(setting)

    def make() -> tuple[jax.Array, jax.Array, list[tuple[jax.Array, ...]]]:
        one = [random(shape, seed) for seed, shape in enumerate(shapes_of(size))]
        each = [tuple(jnp.roll(weight, layer, axis=0) for weight in one) for layer in range(LAYERS)]
        return random((rows, size.d_model), 3), jnp.asarray(ids_of(size, rows)), each

    def run(x: jax.Array, ids: jax.Array, weights: list[tuple[jax.Array, ...]]) -> jax.Array:
        multiply = experts_fn(numerics)
        for layer, (gate, up, down) in enumerate(weights):
            own = (ids + layer) % size.num  # other experts, which have to be arranged anew
            gated_f32, up_f32 = multiply(x, own, gate, up)
            (down_f32,) = multiply((jax.nn.silu(gated_f32) * up_f32).astype(x.dtype), own, down)
            x = down_f32.sum(axis=1).astype(x.dtype)
        return x

    # Rows in the order of experts are written and read, results are written and read; a layer also reads and writes its rows.
    pairs = rows * size.active
    moved = 4 * pairs * (size.d_model + size.d_ff) + 8 * pairs * (2 * size.d_ff + size.d_model) + 4 * rows * size.d_model
    flop = 6.0 * pairs * size.d_model * size.d_ff
    work = Work(LAYERS * (bytes_read(size, rows) + moved), LAYERS * flop)
    return Program(f"{LAYERS} layers of {size.name}, {rows} rows", run, make, numerics=numerics, work=work, calls=30)


def product(setting: Setting, size: Experts) -> Program:
    """The gate of the most rows: `(x, ids, weight)`."""
    numerics = numerics_of(setting)
    rows = max(setting.size.experts_rows)

    def make() -> tuple[jax.Array, ...]:
        return random((rows, size.d_model), 3), jnp.asarray(ids_of(size, rows)), random(shapes_of(size)[0])

    return Program(
        f"experts of {size.name}, {rows} rows",
        lambda x, ids, weight: experts_fn(numerics)(x, ids, weight)[0],
        make,
        numerics=numerics,
        work=Work(bytes_read(size, rows) / 3, 2.0 * rows * size.active * size.d_model * size.d_ff),
        calls=6,
    )


def numerics_of(setting: Setting) -> Numerics:
    """The device's numerics, with pinned products."""
    return setting.schedule_fn(setting.size.cfg).with_numerics(linear="pinned").numerics


def shapes_of(size: Experts) -> tuple[tuple[int, int, int], ...]:
    """Shapes of gate, up and down."""
    wide, narrow = (size.num, size.d_ff, size.d_model), (size.num, size.d_model, size.d_ff)
    return wide, wide, narrow


def ids_of(size: Experts, rows: int) -> np.ndarray:
    """The experts of each row, `[rows, active]` int32, drawn at random."""
    return np.random.default_rng(0).random((rows, size.num)).argsort(axis=1)[:, : size.active].astype(np.int32)


def num_chosen(size: Experts, rows: int) -> int:
    """How many experts some row chooses."""
    return len(np.unique(ids_of(size, rows)))


def bytes_read(size: Experts, rows: int) -> float:
    """Bytes of the matrices of all chosen experts of a layer."""
    return 6.0 * num_chosen(size, rows) * size.d_model * size.d_ff


def bits(y_f32: jax.Array) -> np.ndarray:
    """The bits of float32."""
    return np.asarray(y_f32).view(np.uint32)


def _yes(name: str, holds: bool) -> Entry:
    return Entry(name, float(holds), "yes or no", 1.0)
