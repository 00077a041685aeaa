"""Attention as the mixer of a layer: its weights, its pools of pages, and how it runs over windows and whole sequences."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from detspec.cache import KV, kv_pools, slot_bytes
from detspec.config import ModelConfig, Rope, check_choice, check_counts, check_flags, check_numbers, is_count
from detspec.errors import InputError
from detspec.model.places import Where
from detspec.model.rows import RowOps
from detspec.model.weights import Weights, norm_weight, residual, weight, zeros
from detspec.ops import collectives
from detspec.ops.attention.api import append_fn, attention_and_lse, beside_sinks
from detspec.ops.attention.scores import Scores
from detspec.ops.linear.api import biased
from detspec.ops.rope import Rotation, apply_rope, rope_frequencies, rope_rotation
from detspec.roofline import PassShape, Work

POSITIONS = ("rope", "alibi", "none")
QK_NORMS = ("head", "width", "rotated")
ROPE = Rope()

# (q [..., N, H], k [..., K, H], v [..., K, H]) -> (attended [..., N, H], what the caller threads on)
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Attention:
    """Causal attention over keys and values of all positions, or of the last `window`.

    Attributes:
        num_heads: `N` query heads.
        num_kv_heads: `K` key/value heads; divides `num_heads`.
        head_dim: `H`; need not be `D / N`, must be even (rotary pairs).
        positions: "rope" rotates queries and keys; "alibi" lowers a head's scores in proportion to the distance (Press et al.
            2022, arXiv 2108.12409); "none" does neither.
        rope: how they are rotated; it says nothing with other `positions`.
        window: positions that a token attends to, its own included; None is all.
        qkv_bias: projections to queries, keys and values add a bias.
        o_bias: the output projection adds a bias.
        qk_norm: queries and keys go through a norm.
        score_dim: scores are divided by its square root; None is `H`.
        softcap: scores are squashed into `+-cap` by `cap * tanh(scores / cap)`; None leaves them.
        qk_norm_of: "head" norms each head before it is rotated, "rotated" afterwards (Hunyuan); "width" norms all heads of a
            row together, before (OLMo 2).
        score_scale: scores are multiplied by it, instead of divided (Granite).
        sinks: the softmax of a head has one more score, a weight of the model, that stands for nothing to attend to (gpt-oss).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    positions: str = "rope"
    rope: Rope = ROPE
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    score_dim: float | None = None
    softcap: float | None = None
    qk_norm_of: str = "head"
    score_scale: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "num_heads", "num_kv_heads", "head_dim")
        check_choice(self, "positions", POSITIONS)
        check_flags(self, "qkv_bias", "o_bias", "qk_norm", "sinks")
        check_choice(self, "qk_norm_of", QK_NORMS)
        check_numbers(self, "score_dim", "softcap", "score_scale", optional=True)
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise InputError(f"head_dim must be even (rotary pairs), got {self.head_dim}")
        if not isinstance(self.rope, Rope):
            raise InputError(f"Attention.rope must be a Rope, got {self.rope!r}")
        if self.rotated > self.head_dim:
            raise InputError(f"Rope.size ({self.rope.size}) exceeds Attention.head_dim ({self.head_dim})")
        for name in () if self.rope.scaling is None else ("short_factors", "long_factors"):
            factors = getattr(self.rope.scaling, name)
            if factors and len(factors) != self.rotated // 2:
                raise InputError(f"RopeScaling.{name} must be {self.rotated // 2}, one a frequency, got {len(factors)}")
        if self.window is not None and not is_count(self.window):
            raise InputError(f"Attention.window must be a positive integer or None, got {self.window!r}")

    @property
    def scores(self) -> Scores:
        """How a query and a key give a score."""
        scale = (self.head_dim if self.score_dim is None else self.score_dim) ** -0.5
        scale = scale if self.score_scale is None else self.score_scale
        return Scores(scale, self.softcap, self.window, self.positions == "alibi", self.sinks)

    @property
    def rotated(self) -> int:
        """How many places of a head are rotated."""
        return self.head_dim if self.rope.size is None else self.rope.size

    def weights(self, cfg: ModelConfig) -> Weights:
        """Projections, and biases and norms where it has some."""
        sizes = {"N": self.num_heads, "K": self.num_kv_heads, "H": self.head_dim, "D": cfg.d_model}
        declared = {
            "q": weight("NH D", sizes),
            "k": weight("KH D", sizes),
            "v": weight("KH D", sizes),
            "o": weight("D NH", sizes, residual),
        }
        if self.qkv_bias:
            declared |= {f"{name}_bias": weight(axis, sizes, zeros) for name, axis in (("q", "NH"), ("k", "KH"), ("v", "KH"))}
        if self.o_bias:
            declared["o_bias"] = weight("D", sizes, zeros)
        if self.sinks:
            declared["sinks"] = weight("N", sizes, zeros)
        if self.qk_norm:
            axes = {"q": "NH", "k": "KH"} if self.qk_norm_of == "width" else {"q": "H", "k": "H"}
            declared |= {f"{name}_norm": norm_weight(cfg, axis, **sizes) for name, axis in axes.items()}
        return declared

    def pools(self, numerics: Any, num_pages: int, num_seats: int) -> KV:
        """Pages of keys and of values."""
        return kv_pools(self.num_kv_heads, self.head_dim, numerics, num_pages)

    def prepare(self, positions: jax.Array) -> Rotation | None:
        """The rotation of `positions [...]`, which all layers of the kind share; None if it rotates nothing."""
        if self.positions != "rope":
            return None
        scaling = self.rope.scaling
        factor = 1.0 if scaling is None else scaling.attention_factor
        return rope_rotation(positions, rope_frequencies(self.rotated, self.rope.theta, scaling), factor)

    def windows(
        self, params: dict[str, Any], x: jax.Array, where: Where, pools: KV, ops: RowOps, out_ops: RowOps
    ) -> tuple[jax.Array, KV]:
        """Attention of token rows `x [R, D]` over one layer's pools, into which their own keys and values go first."""
        return self.attend_with(params, x, where.prepared, self._paged(where, pools, params.get("sinks")), ops, out_ops)

    def whole(self, params: dict[str, Any], x: jax.Array, prepared: Rotation | None, ops: RowOps) -> jax.Array:
        """Attention of whole sequences `x [B, T, D]` over themselves, differentiable."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            return ops.attend_fn(self.scores, q, k, v, sinks=params.get("sinks")), None

        return self.attend_with(params, x, prepared, attend, ops, ops)[0]

    def work(self, shape: PassShape) -> Work:
        """Pages that query tiles read once, each multiplied twice; a chip reads the pages of its KV heads."""
        numerics = shape.schedule.numerics
        window = shape.schedule.budget.window
        seen = shape.context if self.window is None else min(shape.context, self.window)
        tiles = shape.windows * -(-window // numerics.query_tile)
        position_bytes = 2 * shape.own_share(self.num_kv_heads) * slot_bytes(self.head_dim, numerics)
        return Work(
            bytes=tiles * numerics.whole_pages(seen) * position_bytes,
            flop=shape.windows * window * 4 * seen * self.num_heads * self.head_dim / shape.chips,
        )

    def attend_with(
        self, params: dict[str, Any], x: jax.Array, rotation: Rotation | None, attend_fn: AttendFn, ops: RowOps, out_ops: RowOps
    ) -> tuple[jax.Array, Any]:
        """Projects `x [..., D]` to heads, rotates by `rotation`, attends by `attend_fn`, projects back.

        `out_ops` works out what is only for the result, `ops` keys and values too.
        """
        heads = x.shape[:-1]
        q, k, v = (
            biased(y_f32, params.get(f"{name}_bias"), x.dtype).reshape(*heads, -1, self.head_dim)
            for name, y_f32 in zip("qkv", ops.linears_f32(x, **{name: params[name] for name in "qkv"}), strict=True)
        )
        if self.qk_norm and self.qk_norm_of != "rotated":
            q, k = self._normed(params, q, k, ops)
        if rotation is not None:
            q = apply_rope(q, rotation, interleaved=self.rope.interleaved)
            k = apply_rope(k, rotation, interleaved=self.rope.interleaved)
        if self.qk_norm and self.qk_norm_of == "rotated":
            q, k = self._normed(params, q, k, ops)
        attended, carry = attend_fn(q, k, v)
        attended = collectives.gather(attended.reshape(*heads, -1).astype(x.dtype))
        bias = None if "o_bias" not in params else collectives.own(params["o_bias"])
        return collectives.gather(biased(out_ops.linear_f32(attended, o=params["o"]), bias, x.dtype)), carry

    def _normed(self, params: dict[str, Any], q: jax.Array, k: jax.Array, ops: RowOps) -> tuple[jax.Array, jax.Array]:
        if self.qk_norm_of != "width":
            return ops.norm(q, params["q_norm"]), ops.norm(k, params["k_norm"])

        def of_row(x: jax.Array, scale: jax.Array, axes: tuple[str, ...]) -> jax.Array:
            whole = collectives.gather(x.reshape(*x.shape[:-2], -1), axes)
            return collectives.own(ops.norm(whole, collectives.gather(scale, axes)), axes).reshape(x.shape)

        return of_row(q, params["q_norm"], collectives.CHIPS), of_row(k, params["k_norm"], collectives.CHIPS[:1])

    def _paged(self, where: Where, pools: KV, sinks: jax.Array | None) -> AttendFn:
        """Attention over pages; threads on the written ones."""
        numerics = where.numerics
        places = where.places
        G, W = places.looking_from.shape
        append = append_fn(numerics)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KV]:
            written = append(pools, k, v, places.page_ids, places.slots)
            attended, lse = attention_and_lse(
                q.reshape(G, W, -1, self.head_dim),
                *written,
                places.tables,
                places.looking_from,
                scores=self.scores,
                numerics=numerics,
            )
            if lse is not None and sinks is not None:
                attended = beside_sinks(attended, lse, collectives.own(sinks))
            return attended.reshape(G * W, -1, self.head_dim), written

        return attend
