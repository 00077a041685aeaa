"""Products with the weights of a layer by rows: pinned, the library's, and int8, whose sums are exact in any order.

A program multiplies by the weights of several layers one after the other: starting a program may take longer than a product,
and the weights of one layer might stay in a cache.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.ops.linear.api import linears_fn
from detspec.roofline import Work
from prove_stages.ceilings import random
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import in_turns, ratio, typical

LEAST_OF_LIBRARY = 1 / 1.15
LEAST_OVER_BFLOAT16 = 1.5
LAYERS = 4
KINDS = ("pinned", "library", "int8")
CHECKED = 16  # outputs of an int8 product that are added up again, exactly

Products = Callable[..., tuple[jax.Array, ...]]  # (x [rows, in], weights [out, in], ...) -> [rows, out], ...


def programs(setting: Setting) -> Iterator[Program]:
    """All three at every number of rows.

    They are compiled one after the other: XLA chooses the library's kernels by their times, which others would spoil.
    """
    for rows in setting.size.product_rows:
        yield from contest(setting, rows).values()


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Measures each number of rows."""
    for rows in setting.size.product_rows:
        yield Measurement(f"{rows} rows", partial(measure, setting, rows))


def measure(setting: Setting, rows: int) -> Iterator[Entry]:
    """Times of one number of rows, and whether int8 is exact; int8 last, since not every library has it at every size."""
    kinds = contest(setting, rows)
    library = kinds["library"].call()
    samples = in_turns({"pinned": kinds["pinned"].call(), "library": library}, setting.size)
    seconds = typical(samples, "pinned") / LAYERS
    work = Work(kinds["pinned"].work.bytes / LAYERS, kinds["pinned"].work.flop / LAYERS)
    bound = setting.bound(work)
    rate = f"{work.flop / seconds / 1e12:.1f} TFLOP/s, {work.bytes / seconds / 1e12:.2f} TB/s"
    name = f"layer, pinned, {rows} rows"
    yield Entry(name, 1e6 * seconds, "us", bound=bound, note=rate, predicted=setting.predicted(work, 1e6))
    yield Entry(
        f"{name}, of the library's speed",
        ratio(samples, "library", "pinned"),
        "",
        setting.bar(LEAST_OF_LIBRARY),
        bound=bound,
        predicted=1.0,
    )
    samples = in_turns({"int8": kinds["int8"].call(), "library": library}, setting.size)
    yield Entry(
        f"layer, int8, {rows} rows, of bfloat16's speed",
        ratio(samples, "library", "int8"),
        "",
        setting.bar(LEAST_OVER_BFLOAT16),
        bound=bound,
        predicted=setting.predicted_ratio(kinds["library"].work, kinds["int8"].work),
    )
    yield Entry(f"int8, {rows} rows, exact", float(is_exact(setting.size.cfg, rows)), "yes or no", 1.0)


def contest(setting: Setting, rows: int) -> dict[str, Program]:
    """The products of `rows` rows with the weights of LAYERS layers: pinned, as XLA chooses, and int8."""
    schedule = setting.schedule_fn(setting.size.cfg)
    pinned, xla = (schedule.with_numerics(linear=linear).numerics for linear in ("pinned", "xla"))
    multiply = {"pinned": partial(_floats, linears_fn(pinned)), "library": partial(_floats, linears_fn(xla)), "int8": _integers}
    found = {kind: layers(setting.size.cfg, rows, kind, multiply[kind]) for kind in KINDS}
    return {**found, "pinned": dataclasses.replace(found["pinned"], numerics=pinned)}


def layers(cfg: ModelConfig, rows: int, kind: str, multiply: Products) -> Program:
    """A program that multiplies rows by the weights of LAYERS layers: q, k and v at once, o, gate and up at once, down."""
    ff = cfg.layer(0).ff
    mixer = cfg.layer(0).mixer
    heads, kv_heads = (mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim)
    groups = ((cfg.d_model, (heads, kv_heads, kv_heads)), (heads, (cfg.d_model,)))
    groups += ((cfg.d_model, (ff.d_ff, ff.d_ff)), (ff.d_ff, (cfg.d_model,)))
    new = _random_int8 if kind == "int8" else random

    def make() -> tuple[list[jax.Array], list[list[list[jax.Array]]]]:
        rows_of = [new((rows, num_in), seed) for seed, (num_in, _) in enumerate(groups)]
        one = [[new((num_out, num_in), n) for n, num_out in enumerate(sizes)] for num_in, sizes in groups]
        return rows_of, [jax.tree.map(partial(jnp.roll, shift=layer, axis=0), one) for layer in range(LAYERS)]

    def run(rows_of: list[jax.Array], weights: list[list[list[jax.Array]]]) -> list[tuple[jax.Array, ...]]:
        found = []
        for layer in weights:
            for group, matrices in enumerate(layer):
                ys = multiply(rows_of[group], *matrices)
                rows_of, ys = jax.lax.optimization_barrier((rows_of, ys))  # one after the other
                found.append(ys)
        return found

    num_weights = sum(num_in * sum(sizes) for num_in, sizes in groups)
    itemsize, sum_size, operations = (1, 4, 1.0) if kind == "int8" else (2, 2, 2.0)  # twice as many operations in int8 a second
    num_bytes = itemsize * num_weights + rows * sum(itemsize * num_in + sum_size * sum(sizes) for num_in, sizes in groups)
    work = Work(float(LAYERS * num_bytes), operations * LAYERS * rows * num_weights)
    return Program(f"products of {LAYERS} layers, {kind}, {rows} rows", run, make, work=work, calls=50)


def _floats(linears_f32: Products, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """Products as a layer hands them on, in the dtype of the rows."""
    return tuple(y_f32.astype(x.dtype) for y_f32 in linears_f32(x, *weights))


def _integers(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """Products of int8 with int32 sums."""
    contracted = ((1,), (1,)), ((), ())
    return tuple(jax.lax.dot_general(x, weight, contracted, preferred_element_type=jnp.int32) for weight in weights)


def _random_int8(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, -127, 128, jnp.int8)


def is_exact(cfg: ModelConfig, rows: int) -> bool:
    """Whether the first outputs of an int8 product of all rows are the sums of int64."""
    ff = cfg.layer(0).ff
    x, weight = jax.jit(lambda: (_random_int8((rows, ff.d_ff)), _random_int8((cfg.d_model, ff.d_ff), 1)))()
    found = np.asarray(jax.jit(_integers)(x, weight)[0][:, :CHECKED])
    return bool((found == np.asarray(x).astype(np.int64) @ np.asarray(weight[:CHECKED]).astype(np.int64).T).all())
