"""Layers of integer models: attention over pages of 8 bits, and the MLP."""

import dataclasses
from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import KV, Int8Pages, Pool
from detspec.config import Rope
from detspec.errors import InputError
from detspec.integer.spec import FRACTION, Activations, Scale
from detspec.model.attention import Attention
from detspec.model.integer_rows import CAPS, SOFT_CAPS, mantissa_of, soft_cap_of
from detspec.model.mlp import GatedMLP
from detspec.model.places import Where
from detspec.ops import collectives, integer
from detspec.ops.integer import I32, U32
from detspec.ops.integer_functions import layout_for
from detspec.ops.integer_pages import MOST_AT_ONCE, ScoreScale

PI = Decimal("3.141592653589793238462643383279502884197")
ACTIVATIONS = ("silu", "gelu_tanh")
NOT_INTEGER = "integer models have no {}: load the model in its own dtype, or choose one without"


class Turns(NamedTuple):
    """Sines and cosines of a pass's positions, 14 fraction bits."""

    sin: jax.Array  # [R, 1, H/2] int32
    cos: jax.Array  # [R, 1, H/2] int32


@dataclasses.dataclass(frozen=True)
class IntegerAttention(Attention):
    """Attention in integers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for lacks, what in (
            (self.positions == "alibi", 'positions "alibi"'),
            (self.o_bias, "bias of the attention's output"),
            (self.qk_norm and self.qk_norm_of == "rotated", 'norms of queries and keys of "rotated"'),
            (self.has_wide_norms and self.num_heads * self.head_dim > 32_768, "norms of more than 32768 places of all heads"),
            (self.softcap is not None and not CAPS[0] <= self.softcap <= CAPS[1], SOFT_CAPS.format("scores")),
            (self.sinks, "attention sinks"),
            (self.head_dim > 512, "heads of more than 512 places"),
            (self.num_heads * self.head_dim > 131_072, "heads of more than 131072 places in all"),
        ):
            if lacks:
                raise InputError(NOT_INTEGER.format(what))

    @property
    def has_wide_norms(self) -> bool:
        """Whether all heads of queries go through a norm together, and all of keys."""
        return self.qk_norm and self.qk_norm_of == "width"

    @property
    def steps(self) -> Sequence[int]:
        """Turns from one position to the next of each pair, 48 fraction bits; 0 where nothing is rotated.

        Pairs are half a head apart: weights are in this order, see `detspec.model.order_rotations`.
        """
        steps = rotation_steps(self.rope, self.rotated) if self.positions == "rope" else ()
        return (*steps, *(0,) * (self.head_dim // 2 - len(steps)))

    def pools(self, numerics: Any, num_pages: int, num_seats: int) -> KV:
        """Pages of keys and of values of 8 bits, and their scales. Raises `InputError` for pages that sums cannot hold."""
        if numerics.page > MOST_AT_ONCE:
            raise InputError(f"integer models have pages of up to {MOST_AT_ONCE} positions, got {numerics.page}")
        scale = Pool((num_pages, self.num_kv_heads, numerics.page), jnp.dtype(I32), 2)

        def pages(slot_axis: int) -> Any:
            shape = (numerics.page, self.head_dim) if slot_axis == 2 else (self.head_dim, numerics.page)
            numbers = Pool((num_pages, self.num_kv_heads, *shape), jnp.dtype(jnp.int8), slot_axis)
            return Int8Pages(numbers, scale)  # type: ignore[arg-type]

        return KV(pages(2), pages(layout_for(numerics).value_slot_axis))

    def prepare(self, positions: jax.Array) -> Turns:  # type: ignore[override]
        """Sines and cosines of `positions [...]`, which all layers of the kind share."""
        turns = integer.turned_by(positions, self.steps)[..., None, :]
        return Turns(integer.sine(turns), integer.sine(turns + U32(2**30)))

    def windows(self, params: dict[str, Any], x: Any, where: Where, pools: Any, ops: Any, out_ops: Any) -> tuple[jax.Array, KV]:
        """Attention of normed rows `x [R, D]` over one layer's pools, into which their own keys and values go first."""
        turns = where.prepared
        places = where.places
        functions = ops.functions
        products = dict(zip("qkv", ops.linears_f32(x, **{name: params[name] for name in "qkv"}), strict=True))

        def heads(name: str) -> jax.Array:
            found = products[name]
            found = integer.added(found, params[f"{name}_bias"][None]) if self.qkv_bias else found
            return found.reshape(len(found), -1, self.head_dim)

        def row_of(name: str) -> Activations:
            if self.has_wide_norms:
                return normed_together(heads(name), params[f"{name}_norm"], ops, name)
            return ops.normed(heads(name), params, f"{name}_norm")

        def turned(name: str) -> tuple[jax.Array, Activations]:
            row = row_of(name)
            return integer.rotated(row, turns.sin, turns.cos), row

        q, of_q = turned("q")
        values, shift = integer.narrowed(q, 14)
        query = Activations(values, of_q.mantissa, of_q.exponent + shift - 14)
        k, of_k = turned("k")
        v = heads("v")
        plain = jnp.full(v.shape[:-1], 2**14, I32)
        of_v = Activations(v, plain, jnp.full_like(plain, -14 - FRACTION))
        append = functions.appended
        written = KV(
            k=append(pools.k, k, of_k._replace(exponent=of_k.exponent - 14), places.page_ids, places.slots),
            v=append(pools.v, v, of_v, places.page_ids, places.slots, slot_axis=functions.layout.value_slot_axis),
        )
        score = self.score_scale_of_two()
        found = functions.attended(query, written, places.tables, places.looking_from, score=score, window=self.window)
        row = integer.row_of(collectives.gather(found.reshape(len(v), -1)), -FRACTION)
        return collectives.gather(out_ops.linear_f32(row, o=params["o"])), written

    def whole(self, params: dict[str, Any], x: jax.Array, prepared: Any, ops: Any) -> jax.Array:
        """Raises `InputError`: integers have no derivative."""
        raise InputError("an integer model cannot be trained: train it in floats, and load what comes of it in integers")

    def score_scale_of_two(self) -> ScoreScale:
        """Numbers that scores are multiplied with, times log2(e), and their soft cap."""
        with localcontext() as context:
            context.prec = 40
            root = Decimal(self.head_dim if self.score_dim is None else self.score_dim).sqrt()  # a library's may differ
            scale = 1 / root if self.score_scale is None else Decimal(self.score_scale)
            return ScoreScale(*mantissa_of(scale / Decimal(2).ln()), soft_cap_of(self.softcap, 1 / Decimal(2).ln()))


@dataclasses.dataclass(frozen=True)
class IntegerMLP(GatedMLP):
    """`down(activation(gate(x)) * up(x))` in integers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for lacks, what in (
            (not self.gated, "MLP without a gate"),
            (self.activation not in ACTIVATIONS, f'activation "{self.activation}"'),
            (self.bias, "biases of the MLP"),
            (self.d_ff > 131_072, "MLP wider than 131072"),
        ):
            if lacks:
                raise InputError(NOT_INTEGER.format(what))

    def rows(self, params: dict[str, Any], x: Any, ops: Any) -> jax.Array:
        """The MLP of rows `x [R, D]`."""
        gate, up = map(collectives.gather, ops.linears_f32(x, **{name: params[name] for name in self.inner}))
        return collectives.gather(ops.linear_f32(ops.functions.gated(gate, up, self.activation), down=params["down"]))


def normed_together(x: jax.Array, scale: Scale, ops: Any, name: str) -> Activations:
    """The norm of all heads `x [R, heads, H]` of "q" or "k" together, see `spec.normed_heads`; a chip has some of them."""
    axes = collectives.CHIPS if name == "q" else collectives.CHIPS[:1]
    whole = collectives.gather(x.reshape(len(x), -1), axes)
    row = ops.functions.normed(whole, scale, ops.epsilon)
    of_heads = (jnp.broadcast_to(part[:, None], x.shape[:2]) for part in (row.mantissa, row.exponent))
    return Activations(collectives.own(row.values, axes).reshape(x.shape), *of_heads)


def rotation_steps(rope: Rope, size: int) -> Sequence[int]:
    """Turns from one position to the next of each pair of a rotation of `size` places, 48 fraction bits.

    Decimal fractions: a logarithm of the system's library may differ in its last bit from that of another system.
    """
    with localcontext() as context:
        context.prec = 40
        of_theta = Decimal(rope.theta).ln()
        found = []
        for pair in range(size // 2):
            frequency = _stretched((-of_theta * 2 * pair / size).exp(), pair, rope, size)
            found.append(int((frequency / (2 * PI) * 2**48 + Decimal("0.5")).to_integral_value(rounding="ROUND_FLOOR")))
    return tuple(found)


def _stretched(frequency: Decimal, pair: int, rope: Rope, size: int) -> Decimal:
    """The frequency of a pair as `rope.scaling` changes it, see `detspec.ops.rope`."""
    scaling = rope.scaling
    if scaling is None:
        return frequency
    if scaling.kind == "longrope":
        return frequency / Decimal(scaling.factors[pair])
    stretched = frequency / Decimal(scaling.factor)
    kept = Decimal(0)
    if scaling.kind == "llama3":
        low = Decimal(scaling.low_freq_factor)
        high = Decimal(scaling.high_freq_factor)
        fits = scaling.original_max_position * frequency / (2 * PI)
        kept = min(max((fits - low) / (high - low), Decimal(0)), Decimal(1))
    if scaling.kind == "yarn":
        low, high = (_dimension(turns, rope, size) for turns in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            low = low.to_integral_value(rounding="ROUND_FLOOR")
            high = high.to_integral_value(rounding="ROUND_CEILING")
        low = max(low, Decimal(0))
        span = min(high, Decimal(size - 1)) - low or Decimal("0.001")
        kept = 1 - min(max((pair - low) / span, Decimal(0)), Decimal(1))
    return (1 - kept) * stretched + kept * frequency


def _dimension(turns: float, rope: Rope, size: int) -> Decimal:
    """The dimension that turns so often within the original length, for YaRN."""
    assert rope.scaling is not None
    return size * (rope.scaling.original_max_position / (Decimal(turns) * 2 * PI)).ln() / (2 * Decimal(rope.theta).ln())
