"""Functions of integer models on CPUs, by kernels in C (`native/integer.c`): the same integers as those of `ops.integer`."""

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import KV, Int8Pages
from detspec.integer.spec import BEND, INVERSE_ROOTS, LOGS, Activations, IntMatrix, Scale, SoftCap
from detspec.native.library import kernel
from detspec.ops.integer import I32
from detspec.ops.integer_pages import ScoreScale


def products(row: Activations, *matrices: IntMatrix, bits: int = 15) -> list[jax.Array]:
    """Products of `row [R, n]` with several matrices `[m, n]`: fixed `[R, m]` of each."""
    found = [jax.ShapeDtypeStruct((row.values.shape[0], matrix.values.shape[0]), I32) for matrix in matrices]
    leaves = [leaf for matrix in matrices for leaf in matrix]
    return list(kernel("detspec_integer_product", jnp.float32, found)(*row, *leaves, bits=np.int32(bits)))


def normed(x: jax.Array, scale: Scale, epsilon: int) -> Activations:
    """See `ops.integer.normed`; `x [..., n]`."""
    n = x.shape[-1]
    call = kernel("detspec_integer_norm", jnp.float32, _row_like(x.reshape(-1, n)))
    found = call(x.reshape(-1, n), *scale, jnp.asarray(INVERSE_ROOTS, I32), epsilon=np.int32(epsilon))
    return _shaped(found, x)


def gated(gate: jax.Array, up: jax.Array, activation: str = "silu", *, spread: bool = False) -> Activations:
    """See `ops.integer.gated` and `ops.integer.spread`; `[R, n]` both."""
    call = kernel("detspec_integer_gate", jnp.float32, _row_like(gate))
    return Activations(*call(gate, up, gelu=np.int32(activation == "gelu_tanh"), spread=np.int32(spread)))


def attended(
    q: Activations, pools: KV, tables: jax.Array, positions: jax.Array, *, score: ScoreScale, window: int | None
) -> jax.Array:
    """See `ops.integer_pages.attended`."""
    call = kernel("detspec_integer_attention", jnp.float32, jax.ShapeDtypeStruct(q.values.shape, I32))
    pages = (leaf for part in pools for leaf in (part.values, part.scale))  # type: ignore[union-attr]
    cap = score.cap or SoftCap(0, 0, 0)
    numbers = {
        "cap": cap.limit,
        "cap_exponent": cap.exponent,
        "cap_mantissa": cap.mantissa,
        "score_exponent": score.exponent,
        "score_mantissa": score.mantissa,
        "sliding": window or 0,
    }
    return call(*q, *pages, tables, positions, **{name: np.int32(number) for name, number in numbers.items()})


def appended(
    pages: Int8Pages, x: jax.Array, row: Activations, page_ids: jax.Array, slots: jax.Array, *, slot_axis: int = 2
) -> Int8Pages:
    """See `ops.integer_pages.appended`."""
    assert slot_axis == 2, "the kernel writes pages in the layout of CPUs"
    found = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (pages.values, pages.scale)]
    call = kernel("detspec_integer_append", jnp.float32, found, in_place={0: 0, 1: 1})
    return Int8Pages(*call(pages.values, pages.scale, x, row.mantissa, row.exponent, page_ids, slots))


def gumbel(seed: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """See `ops.integer_choices.gumbel`."""
    places = np.arange(256) + 256
    call = kernel("detspec_integer_noise", jnp.float32, jax.ShapeDtypeStruct((seed.shape[0], vocab_size), I32))
    return call(seed.astype(jnp.uint32), position, jnp.asarray(LOGS, I32), jnp.asarray(BEND // (places * places), I32))


def _row_like(x: jax.Array) -> list[jax.ShapeDtypeStruct]:
    rows = jax.ShapeDtypeStruct(x.shape[:1], I32)
    return [jax.ShapeDtypeStruct(x.shape, I32), rows, rows]


def _shaped(found: list[jax.Array], like: jax.Array) -> Activations:
    values, mantissa, exponent = found
    return Activations(values.reshape(like.shape), mantissa.reshape(like.shape[:-1]), exponent.reshape(like.shape[:-1]))
