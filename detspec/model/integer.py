"""Attention over pages and the MLP of integer models, made of `detspec.ops.integer`.

The pools hold keys and values of 8 bits, each with `mantissa + 2**16 * exponent` of its token and head. Attention looks at a
block of pages twice: first for the largest score and exponent, then for the sums, which may be added up in any order.
"""

import dataclasses
from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from detspec.cache import KV, Int8Pages, Pool, append
from detspec.config import Rope
from detspec.errors import InputError
from detspec.integer.spec import FRACTION, LIMIT, Activations, Cached
from detspec.model.attention import Attention
from detspec.model.mlp import GatedMLP
from detspec.model.places import Where
from detspec.ops import collectives, integer
from detspec.ops.integer import I32, NO_SCORE, U32

BLOCK = 256  # positions that a step of attention looks at
PI = Decimal("3.141592653589793238462643383279502884197")
NOT_INTEGER = "integer models have no {}: load the model in its own dtype, or choose one without"


class Turns(NamedTuple):
    """Sines and cosines of a pass's positions, 14 fraction bits."""

    sin: jax.Array  # [R, 1, H/2] int32
    cos: jax.Array  # [R, 1, H/2] int32


@dataclasses.dataclass(frozen=True)
class IntegerAttention(Attention):
    """Attention in integers; it takes the fields of Llama's, Qwen's and Mistral's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scaling = self.rope.scaling
        for lacks, what in (
            (self.positions != "rope", f'positions "{self.positions}"'),
            (self.o_bias, "bias of the attention's output"),
            (self.qk_norm and self.qk_norm_of != "head", f'norms of queries and keys of "{self.qk_norm_of}"'),
            (self.softcap is not None, "soft cap of scores"),
            (self.sinks, "attention sinks"),
            (self.rope.interleaved, "interleaved rotations"),
            (self.rotated != self.head_dim, "rotations of a part of each head"),
            (self.head_dim > 512, "heads of more than 512 places"),
            (scaling is not None and scaling.kind not in ("linear", "llama3"), f"{scaling and scaling.kind} rope scaling"),
        ):
            if lacks:
                raise InputError(NOT_INTEGER.format(what))

    def pools(self, numerics: Any, num_pages: int, num_seats: int) -> KV:
        """Pages of keys and of values of 8 bits, and their scales."""
        shape = (num_pages, self.num_kv_heads, numerics.page, self.head_dim)
        numbers = Pool(shape, jnp.dtype(jnp.int8), 2)
        scale = Pool(shape[:3], jnp.dtype(I32), 2)
        pages: Any = Int8Pages(numbers, scale)  # type: ignore[arg-type]
        return KV(pages, pages)

    def prepare(self, positions: jax.Array) -> Turns:  # type: ignore[override]
        """Sines and cosines of `positions [...]`, which all layers of the kind share."""
        turns = integer.turned_by(positions, rotation_steps(self.rope, self.head_dim))[..., None, :]
        return Turns(integer.sine(turns), integer.sine(turns + U32(2**30)))

    def windows(self, params: dict[str, Any], x: Any, where: Where, pools: Any, ops: Any, out_ops: Any) -> tuple[jax.Array, KV]:
        """Attention of normed rows `x [R, D]` over one layer's pools, into which their own keys and values go first."""
        turns = where.prepared

        def heads(name: str) -> jax.Array:
            found = integer.product(x, params[name], params.get(f"{name}_bias"))
            return found.reshape(*found.shape[:-1], -1, self.head_dim)

        def turned(name: str) -> tuple[jax.Array, Activations]:
            scale = params.get(f"{name}_norm")
            row = integer.row_of(heads(name), -FRACTION) if scale is None else integer.normed(heads(name), scale, ops.epsilon)
            return integer.rotated(row, turns.sin, turns.cos), row

        q, of_q = turned("q")
        values, shift = integer.narrowed(q, 14)
        k, of_k = turned("k")
        v = heads("v")
        plain = jnp.full(v.shape[:-1], 2**14, I32)
        written = KV(
            k=_append(pools.k, integer.cached(k, of_k._replace(exponent=of_k.exponent - 14)), where),
            v=_append(pools.v, integer.cached(v, Activations(v, plain, jnp.full_like(plain, -14 - FRACTION))), where),
        )
        query = Activations(values, of_q.mantissa, of_q.exponent + shift - 14)
        found = self._attended(query, written, where).reshape(len(plain), -1)
        row = integer.row_of(collectives.gather(found), -FRACTION)
        return collectives.gather(integer.product(row, params["o"])), written

    def whole(self, params: dict[str, Any], x: jax.Array, prepared: Any, ops: Any) -> jax.Array:
        """Raises `InputError`: integers have no derivative."""
        raise InputError("an integer model cannot be trained: train it in floats, and load what comes of it in integers")

    def score_scale_of_two(self) -> tuple[int, int]:
        """`(m, e)`: what scores are multiplied with, times log2(e), is about `m * 2**e`."""
        with localcontext() as context:
            context.prec = 40
            return mantissa_of(Decimal(self.scores.scale) / Decimal(2).ln())

    def _attended(self, q: Activations, pools: Any, where: Where) -> jax.Array:
        """Attention of queries `[R, N, H]`: fixed `[R, N, H]`; see `spec.attended`."""
        places = where.places
        G, W = places.looking_from.shape
        page = pools.k.values.shape[2]
        K = pools.k.values.shape[1]
        H = self.head_dim
        max_pages = places.tables.shape[1]
        at_once = min(max(1, BLOCK // page), max_pages)
        tables = jnp.pad(places.tables, ((0, 0), (0, -max_pages % at_once)))
        score_mantissa, score_exponent = self.score_scale_of_two()

        def by_head(x: jax.Array) -> jax.Array:  # [R, N, ...] -> [G, K, Q * W, ...]
            x = x.reshape(G, W, K, -1, *x.shape[2:])
            return jnp.moveaxis(x, 1, 3).reshape(G, K, -1, *x.shape[4:])

        high, low = (by_head(part) for part in integer.split(q.values))
        of_query = by_head(integer.rounded_shift(q.mantissa * score_mantissa, 15))
        exponent = by_head(q.exponent + score_exponent)
        Q = high.shape[2] // W
        looking_from = jnp.tile(places.looking_from, (1, Q))[:, None, :, None]  # [G, 1, Q * W, 1]

        def block_of(pages: Any, step: jax.Array) -> Cached:
            ids = lax.dynamic_slice_in_dim(tables, step * at_once, at_once, axis=1)
            values = jnp.moveaxis(pages.values[ids], 2, 1).reshape(G, K, at_once * page, H)
            scale = jnp.moveaxis(pages.scale[ids], 2, 1).reshape(G, K, 1, at_once * page)
            return Cached(values, scale & 0xFFFF, scale >> 16)

        def visible_at(step: jax.Array) -> jax.Array:
            place = step * (at_once * page) + jnp.arange(at_once * page, dtype=I32)
            visible = place <= looking_from
            return visible if self.window is None else visible & (place > looking_from - self.window)

        def scores(step: jax.Array, keys: Cached) -> jax.Array:
            total = (_each(high, keys.values, 3, 3) << 8) + _each(low, keys.values, 3, 3)
            mantissa = integer.rounded_shift(of_query[..., None] * keys.mantissa, 15)
            score = integer.scaled(total, mantissa, -(exponent[..., None] + keys.exponent + 30 + FRACTION))
            return jnp.where(visible_at(step), score, NO_SCORE)

        def look(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            largest, highest, is_bad = carry
            keys = block_of(pools.k, step)
            values = block_of(pools.v, step)
            visible = visible_at(step)
            lost = integer.is_lost(keys.exponent) | integer.is_lost(values.exponent)
            return (
                jnp.maximum(largest, scores(step, keys).max(-1)),
                jnp.maximum(highest, jnp.where(visible, values.exponent, NO_SCORE).max(-1)),
                is_bad | (visible & lost).any(-1),
            )

        def add(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            of_all, of_high, of_low = carry
            keys = block_of(pools.k, step)
            values = block_of(pools.v, step)
            visible = visible_at(step)
            a, shift = integer.power(jnp.where(visible, largest[..., None] - scores(step, keys), 0))
            p = jnp.where(visible, integer.rounded_shift(a, shift + 1), 0)
            fall = jnp.minimum(15 + highest[..., None] - values.exponent, 31)
            weight = jnp.where(visible, integer.rounded_shift(p * values.mantissa, jnp.maximum(fall, 0)), 0)
            more_high, more_low = (_each(part, values.values, 3, 2) for part in integer.split(weight))
            return of_all + p.sum(-1, dtype=U32), of_high + more_high, of_low + more_low

        num_steps = jnp.max(places.looking_from) // (at_once * page) + 1
        rows = of_query.shape
        least = jnp.full(rows, NO_SCORE, I32)
        largest, highest, is_bad = lax.fori_loop(0, num_steps, look, (least, least, jnp.zeros(rows, bool)))
        highest = jnp.where(highest == NO_SCORE, 0, highest)  # of rows that see nothing, which pad a pass
        nothing = jnp.zeros(rows, U32), jnp.zeros((*rows, H), I32), jnp.zeros((*rows, H), I32)
        of_all, of_high, of_low = lax.fori_loop(0, num_steps, add, nothing)
        of_all = jnp.maximum(of_all, 2**14)
        fall = integer.bit_length(of_all) - 15
        carried = jnp.where(fall > 0, (of_all >> jnp.maximum(fall - 1, 0).astype(U32)) & 1, 0)
        inverse = lax.div(jnp.full(rows, 2**29, I32), ((of_all >> fall.astype(U32)) + carried).astype(I32))
        found = integer.scaled(of_high + ((of_low + 128) >> 8), inverse[..., None], (fall - highest - 10)[..., None])
        found = jnp.where((is_bad | integer.is_lost(exponent))[..., None], LIMIT, found)
        return jnp.moveaxis(found.reshape(G, K, Q, W, H), 3, 1).reshape(G * W, K * Q, H)


def _each(a: jax.Array, b: jax.Array, of_a: int, of_b: int) -> jax.Array:
    """Sums of products along axes `of_a` and `of_b` of int8 arrays whose first two axes are the same."""
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((0, 1), (0, 1))), preferred_element_type=I32)


def _append(pages: Any, new: Cached, where: Where) -> Int8Pages:
    """Writes keys or values `[R, K, H]` of 8 bits at the places of a pass."""
    places = where.places
    scale = (new.exponent << 16) | new.mantissa
    return Int8Pages(
        values=append(pages.values, new.values, places.page_ids, places.slots),
        scale=append(pages.scale[..., None], scale[..., None], places.page_ids, places.slots)[..., 0],
    )


@dataclasses.dataclass(frozen=True)
class IntegerMLP(GatedMLP):
    """`down(silu(gate(x)) * up(x))` in integers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for lacks, what in (
            (not self.gated, "MLP without a gate"),
            (self.activation != "silu", f'activation "{self.activation}"'),
            (self.bias, "biases of the MLP"),
            (self.d_ff > 131_072, "MLP wider than 131072"),
        ):
            if lacks:
                raise InputError(NOT_INTEGER.format(what))

    def rows(self, params: dict[str, Any], x: Any, ops: Any) -> jax.Array:
        """The MLP of rows `x [..., D]`."""
        gate, up = (integer.product(x, params[name]) for name in self.inner)
        row = integer.gated(collectives.gather(gate), collectives.gather(up))
        return collectives.gather(integer.product(row, params["down"]))


def mantissa_of(x: Decimal | float) -> tuple[int, int]:
    """`(m, e)` with `x > 0` about `m * 2**e`, `2**14 <= m <= 2**15`."""
    x = Decimal(x)
    e = 0
    while x >= 2**15:
        x /= 2
        e += 1
    while x < 2**14:
        x *= 2
        e -= 1
    return int((x + Decimal("0.5")).to_integral_value(rounding="ROUND_FLOOR")), e


def rotation_steps(rope: Rope, size: int) -> Sequence[int]:
    """Turns from one position to the next of each pair of a rotation of `size` places, 48 fraction bits.

    Decimal fractions: a logarithm of the system's library may differ in its last bit from that of another system.
    """
    with localcontext() as context:
        context.prec = 40
        of_theta = Decimal(rope.theta).ln()
        found = []
        for pair in range(size // 2):
            frequency = (-of_theta * 2 * pair / size).exp()
            scaling = rope.scaling
            if scaling is not None:
                stretched = frequency / Decimal(scaling.factor)
                kept = Decimal(0)
                if scaling.kind == "llama3":
                    low = Decimal(scaling.low_freq_factor)
                    high = Decimal(scaling.high_freq_factor)
                    fits = scaling.original_max_position * frequency / (2 * PI)
                    kept = min(max((fits - low) / (high - low), Decimal(0)), Decimal(1))
                frequency = (1 - kept) * stretched + kept * frequency
            found.append(int((frequency / (2 * PI) * 2**48 + Decimal("0.5")).to_integral_value(rounding="ROUND_FLOOR")))
    return tuple(found)
