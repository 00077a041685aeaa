"""Noise of integer models on TPUs, by a kernel in Pallas: the same integers as those of `ops.integer_choices`.

XLA looks up tables of logarithms number by number: for each row four gathers of as many numbers as the vocabulary has, which
also take half a minute to compile. The lanes of a TPU look up each other's numbers at once, so here the tables lie in them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from detspec.integer.spec import BEND, LOGS
from detspec.ops.gumbel import threefry2x32
from detspec.ops.integer import I32, U32
from detspec.ops.integer_choices import Arc, gumbel_of, noise_key

ROWS = 8
LANES = 128
BLOCK = 2048  # tokens of a step of the kernel


def gumbel(seed: jax.Array, position: jax.Array, vocab_size: int, *, interpret: bool = False) -> jax.Array:
    """See `ops.integer_choices.gumbel`."""
    key = lax.bitcast_convert_type(jnp.stack(noise_key(seed, position), axis=1), I32)
    shape = jax.ShapeDtypeStruct((len(key), vocab_size), I32)
    rows = pl.BlockSpec((ROWS, 2), lambda row, _: (row, 0))
    tables = pl.BlockSpec((6, LANES), lambda *_: (0, 0))
    call = pl.pallas_call(
        _noise,
        grid=(pl.cdiv(len(key), ROWS), pl.cdiv(vocab_size, BLOCK)),
        in_specs=[rows, tables],
        out_specs=pl.BlockSpec((ROWS, BLOCK), lambda row, block: (row, block)),
        out_shape=shape,
        interpret=interpret,
    )
    return call(key, jnp.asarray(_arcs()))


def _arcs() -> np.ndarray:
    """Lays out the 256 arcs, two halves of each field, `[3 * 2, 128]` int32."""
    logs = np.asarray(LOGS, np.int64)
    places = np.arange(256) + 256
    return np.stack([logs[:-1], np.diff(logs), BEND // (places * places)]).reshape(6, LANES).astype(np.int32)


def _noise(key_ref, tables_ref, noise_ref) -> None:  # type: ignore[no-untyped-def]
    tables = tables_ref[...]
    key = [jnp.broadcast_to(lax.bitcast_convert_type(key_ref[:, i : i + 1], U32), (ROWS, LANES)) for i in range(2)]
    zero = jnp.zeros((ROWS, LANES), U32)
    token = lax.broadcasted_iota(I32, (ROWS, LANES), 1) + pl.program_id(1) * BLOCK

    def of_lanes(step: jax.Array, _: None) -> None:
        first = pl.multiple_of(step * LANES, LANES)
        x, y = threefry2x32((key[0], key[1]), (zero, (token + first).astype(U32)))
        noise_ref[:, pl.ds(first, LANES)] = gumbel_of(x ^ y, partial(_arc_at, tables))

    lax.fori_loop(0, BLOCK // LANES, of_lanes, None)


def _arc_at(tables: jax.Array, place: jax.Array) -> Arc:
    """Arcs at `place [ROWS, LANES]`: a lane reads one of both halves of each table."""

    def look_up(half: int) -> jax.Array:
        table = jnp.broadcast_to(tables[half][None, :], (ROWS, LANES))
        return jnp.take_along_axis(table, place & (LANES - 1), axis=1, mode="promise_in_bounds")

    return Arc(*(jnp.where(place < LANES, look_up(2 * i), look_up(2 * i + 1)) for i in range(3)))
