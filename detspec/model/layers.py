"""One decoder block: attention through a callable that knows about caches, and a gated MLP."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.ops import collectives
from detspec.ops.alibi import alibi_slopes, lower_scores
from detspec.ops.linear.api import LinearsFn, biased
from detspec.ops.norm import rms_norm
from detspec.ops.rope import Rotation, apply_rope, rope_frequencies, rope_rotation
from detspec.ops.row_sum import SumFn
from detspec.ops.softcap import softcap

# (q [..., N, H], k [..., K, H], v [..., K, H]) -> (attended [..., N, H], what the caller threads on)
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
NormFn = Callable[[jax.Array, jax.Array], jax.Array]  # (x [..., D], scale [D]) -> [..., D]
ActivationFn = Callable[[jax.Array], jax.Array]
ACTIVATION_FNS: dict[str, ActivationFn] = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class RowOps(NamedTuple):
    """Operations on single token rows, whose order of additions a schedule fixes."""

    norm: NormFn
    linears_f32: LinearsFn

    def linear_f32(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """`linears_f32` with one weight."""
        return self.linears_f32(x, weight)[0]


def row_ops(cfg: ModelConfig, sum_fn: SumFn, linears_f32: LinearsFn) -> RowOps:
    """This model's RMSNorm, summed by `sum_fn`, and `linears_f32`."""
    return RowOps(partial(rms_norm, eps=cfg.norm_eps, sum_fn=sum_fn, plus_one=cfg.norm_plus_one), linears_f32)


def rotations_of(cfg: ModelConfig, positions: jax.Array) -> tuple[Rotation | None, ...]:
    """Each layer's rotation of `positions [...]`, None if the model rotates nothing; layers of a kind share one."""
    if cfg.position_encoding == "alibi":
        return (None,) * cfg.num_layers
    factor = 1.0 if cfg.rope_scaling is None else cfg.rope_scaling.attention_factor
    rotation = rope_rotation(positions, rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling), factor)
    if cfg.sliding_rope_theta is None or not any(cfg.sliding_layers):
        return (rotation,) * cfg.num_layers
    sliding = rope_rotation(positions, rope_frequencies(cfg.head_dim, cfg.sliding_rope_theta))
    return tuple(sliding if slides else rotation for slides in cfg.sliding_layers)


def attention(
    layer: dict[str, jax.Array],
    cfg: ModelConfig,
    x: jax.Array,
    rotation: Rotation | None,
    attend_fn: AttendFn,
    ops: RowOps,
    out_ops: RowOps,
) -> tuple[jax.Array, Any]:
    """Projects `x [..., D]` to heads, rotates by `rotation` if any, attends, projects back; returns `([..., D], carry)`.

    `out_ops` works out what is only for the result, `ops` keys and values too.
    """
    heads = x.shape[:-1]
    q, k, v = (
        biased(y_f32, layer.get(f"{name}_bias"), x.dtype).reshape(*heads, -1, cfg.head_dim)
        for name, y_f32 in zip("qkv", ops.linears_f32(x, layer["q"], layer["k"], layer["v"]), strict=True)
    )
    if cfg.qk_norm:
        q = ops.norm(q, layer["q_norm"])
        k = ops.norm(k, layer["k_norm"])
    if rotation is not None:
        q = apply_rope(q, rotation)
        k = apply_rope(k, rotation)
    attended, carry = attend_fn(q, k, v)
    attended = collectives.gather(attended.reshape(*heads, -1).astype(x.dtype))
    bias = None if "o_bias" not in layer else collectives.own(layer["o_bias"])
    return collectives.gather(biased(out_ops.linear_f32(attended, layer["o"]), bias, x.dtype)), carry


def mlp(layer: dict[str, jax.Array], cfg: ModelConfig, x: jax.Array, ops: RowOps) -> jax.Array:
    """Gated MLP: `down(activation(gate(x)) * up(x))`, `x [..., D]`."""
    gate_f32, up_f32 = ops.linears_f32(x, layer["gate"], layer["up"])
    gated = collectives.gather((ACTIVATION_FNS[cfg.activation](gate_f32) * up_f32).astype(x.dtype))
    return collectives.gather(ops.linear_f32(gated, layer["down"]).astype(x.dtype))


def block(
    layer: dict[str, jax.Array],
    cfg: ModelConfig,
    x: jax.Array,
    rotation: Rotation | None,
    attend_fn: AttendFn,
    ops: RowOps,
    out_ops: RowOps | None = None,
) -> tuple[jax.Array, Any]:
    """One pre-norm decoder block over `x [..., D]`, with norms after its two halves too if the config asks for them.

    What comes after keys and values is done by `out_ops`, by `ops` too if None.
    """
    out_ops = out_ops or ops
    with jax.named_scope("attention"):
        attended, carry = attention(layer, cfg, ops.norm(x, layer["attn_norm"]), rotation, attend_fn, ops, out_ops)
        x = x + (ops.norm(attended, layer["attn_post_norm"]) if cfg.post_norms else attended)
    with jax.named_scope("mlp"):
        transformed = mlp(layer, cfg, ops.norm(x, layer["mlp_norm"]), out_ops)
        x = x + (ops.norm(transformed, layer["mlp_post_norm"]) if cfg.post_norms else transformed)
    return x, carry


def scale_embeddings(cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """Embedding rows `x [..., D]` as the first block takes them."""
    return x * jnp.asarray(cfg.d_model**0.5, x.dtype) if cfg.scale_embeddings else x


def logits_f32(params: dict[str, Any], cfg: ModelConfig, x: jax.Array, ops: RowOps) -> jax.Array:
    """Final norm and output head: `x [..., D]` -> float32 `[..., V]`; see `head_f32`."""
    with jax.named_scope("logits"):
        return head_f32(params, cfg, ops.norm(x, params["final_norm"]), ops)


def head_f32(params: dict[str, Any], cfg: ModelConfig, normed: jax.Array, ops: RowOps) -> jax.Array:
    """Output head: `normed [..., D]` -> float32 `[..., V]`; on chips for their share of the rows, see `to_rows`."""
    own_f32 = ops.linear_f32(normed, params["head"] if "head" in params else params["embed"])
    return softcap(collectives.to_rows(own_f32), cfg.logit_softcap)


def attend_sequence(
    cfg: ModelConfig, q: jax.Array, k: jax.Array, v: jax.Array, *, sliding_window: int | None = None, query_block: int = 128
) -> jax.Array:
    """Causal attention of whole sequences over themselves, for training: `q [B, T, N, H]`, `k, v [B, T, K, H]`.

    Queries go in blocks that meet only the keys up to their own end, so nearly half of the masked products are never made:

        query_block 2, T 4:   q 0..1 x k 0..1     q 2..3 x k 0..3

    A query attends to the last `sliding_window` positions up to its own, or to all of them. Linear biases lower a head's
    capped scores by its slope times the distance.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q_f32 = q.astype(jnp.float32).reshape(B, T, K, N // K, H) * np.float32(cfg.score_scale)
    k_f32 = k.astype(jnp.float32)
    v_f32 = v.astype(jnp.float32)
    slopes = jnp.asarray(alibi_slopes(N).reshape(1, K, N // K, 1, 1))
    attended = []
    for start in range(0, T, query_block):
        end = min(start + query_block, T)
        scores = softcap(jnp.einsum("BTKQH,BSKH->BKQTS", q_f32[:, start:end], k_f32[:, :end]), cfg.attn_softcap)
        distance = np.arange(start, end)[:, None] - np.arange(end)[None, :]
        if cfg.position_encoding == "alibi":
            scores = lower_scores(scores, slopes, jnp.asarray(distance, jnp.int32)[None, None, None])
        visible = (distance >= 0) & (distance < (sliding_window or T))
        weights = jax.nn.softmax(jnp.where(visible[None, None, None], scores, -jnp.inf), axis=-1)
        attended.append(jnp.einsum("BKQTS,BSKH->BTKQH", weights, v_f32[:, :end]))
    return jnp.concatenate(attended, axis=1).reshape(B, T, N, H).astype(q.dtype)
