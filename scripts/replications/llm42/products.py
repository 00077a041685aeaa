"""Panel 2: what batch-invariant products and norms cost, over those that the compiler likes best."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.environment import default_schedule
from detspec.ops.linear.api import LinearFn, linear_fn
from detspec.ops.norm import rms_norm
from detspec.ops.row_sum import fixed_sum, native_sum, sum_fn
from scripts.replications.llm42.traffic import Shape, compiled_invariant, config_of
from scripts.replications.turns import Prepare, time_by_turns

LIBRARY = "library"  # the compiler's own
KERNEL = "kernel"  # what a canonical pass runs
TILES = "tiles"  # tiles of one size, by the compiler


def product_times(*, shape: Shape, rows: Sequence[int], norm_rows: int, repeats: int) -> dict[str, Any]:
    """Times of a model's products by rows, and of its norm, in turn within this process.

    Returns:
        "found": for each number of rows the milliseconds of all products by each implementation, and the median "ratio" to the
        library's within a round. "norms": milliseconds and ratios of one norm over `norm_rows` rows. "row_variants": how many
        different bit patterns a fixed row's products had over all numbers of rows, by implementation; one if batch-invariant.
    """
    cfg = config_of(shape)
    own = default_schedule(cfg).numerics
    products = {
        LIBRARY: linear_fn(compiled_invariant(cfg).with_numerics(linear="xla").numerics),
        KERNEL: linear_fn(default_schedule(cfg).with_numerics(linear="pinned").numerics),
        TILES: linear_fn(compiled_invariant(cfg).numerics),
    }
    weights = [_random(cfg, shape, number) for number, shape in enumerate(shapes_of(cfg))]
    calls = {name: jax.jit(partial(_all_products, product)) for name, product in products.items()}
    xs = {number: [_random(cfg, (max(rows), w.shape[1]), 9)[:number] for w in weights] for number in rows}
    cases: dict[str, Prepare] = {
        f"{name} {number}": _call(calls[name], xs[number], weights) for number in rows for name in products
    }
    seconds = time_by_turns(cases, repeats)
    first_rows: dict[str, set[bytes]] = {
        name: {b"".join(np.asarray(y[0]).tobytes() for y in calls[name](xs[number], weights)) for number in rows}
        for name in products
    }
    x = _random(cfg, (norm_rows, cfg.d_model), 7)
    scale = jnp.ones(cfg.d_model, cfg.jax_dtype)
    sums = {LIBRARY: native_sum, KERNEL: sum_fn(own), TILES: fixed_sum}
    norms: dict[str, Prepare] = {
        name: _call(jax.jit(partial(rms_norm, eps=cfg.norm_eps, sum_fn=sum_of)), x, scale) for name, sum_of in sums.items()
    }
    norm_seconds = time_by_turns(norms, repeats)
    return {
        "shapes": shapes_of(cfg),
        "found": [{"rows": n, **_compared({name: seconds[f"{name} {n}"] for name in products})} for n in rows],
        "norms": _compared(norm_seconds),
        "row_variants": {name: len(variants) for name, variants in first_rows.items()},
    }


def shapes_of(cfg: ModelConfig) -> list[tuple[int, int]]:
    """`[out, in]` of the products that are timed: queries, up, down and the head."""
    ff = cfg.layer(0).ff
    mixer = cfg.layer(0).mixer
    D = cfg.d_model
    return [(mixer.num_heads * mixer.head_dim, D), (ff.d_ff, D), (D, ff.d_ff), (cfg.vocab_size, D)]


def _compared(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        "ms": {name: 1e3 * median(times) for name, times in seconds.items()},
        "ratio": {
            name: median(mine / its for mine, its in zip(times, seconds[LIBRARY], strict=True))
            for name, times in seconds.items()
        },
    }


def _all_products(product: LinearFn, xs: Sequence[jax.Array], weights: Sequence[jax.Array]) -> list[jax.Array]:
    return [product(x, weight) for x, weight in zip(xs, weights, strict=True)]


def _call(function: Callable[..., Any], *args: Any) -> Prepare:
    return lambda: lambda: function(*args)


def _random(cfg: ModelConfig, shape: tuple[int, int], seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(cfg.jax_dtype)
