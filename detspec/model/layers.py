"""One decoder block: attention through a callable that knows about caches, and a gated MLP."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.ops.linear import linear, linear_f32
from detspec.ops.norm import rms_norm
from detspec.ops.rope import Rotation, apply_rope
from detspec.ops.row_sum import SumFn

# (q [..., N, H], k [..., K, H], v [..., K, H]) -> (attended [..., N, H], what the caller threads on)
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def attention(
    layer: dict[str, jax.Array],
    cfg: ModelConfig,
    x: jax.Array,
    rotation: Rotation,
    attend_fn: AttendFn,
) -> tuple[jax.Array, Any]:
    """Projects `x [..., D]` to heads, rotates, attends with `attend_fn`, projects back; returns `([..., D], carry)`."""
    heads = x.shape[:-1]
    q = linear(x, layer["q"]).reshape(*heads, cfg.num_heads, cfg.head_dim)
    k = linear(x, layer["k"]).reshape(*heads, cfg.num_kv_heads, cfg.head_dim)
    v = linear(x, layer["v"]).reshape(*heads, cfg.num_kv_heads, cfg.head_dim)
    q = apply_rope(q, rotation)
    k = apply_rope(k, rotation)
    attended, carry = attend_fn(q, k, v)
    return linear(attended.reshape(*heads, cfg.num_heads * cfg.head_dim).astype(x.dtype), layer["o"]), carry


def mlp(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Gated MLP with SiLU: `down(silu(gate(x)) * up(x))`, `x [..., D]`."""
    gate_f32 = linear_f32(x, layer["gate"])
    up_f32 = linear_f32(x, layer["up"])
    return linear((jax.nn.silu(gate_f32) * up_f32).astype(x.dtype), layer["down"])


def block(
    layer: dict[str, jax.Array],
    cfg: ModelConfig,
    x: jax.Array,
    rotation: Rotation,
    attend_fn: AttendFn,
    sum_fn: SumFn,
) -> tuple[jax.Array, Any]:
    """One pre-norm decoder block over `x [..., D]`."""
    with jax.named_scope("attention"):
        attended, carry = attention(layer, cfg, rms_norm(x, layer["attn_norm"], cfg.norm_eps, sum_fn), rotation, attend_fn)
    x = x + attended
    with jax.named_scope("mlp"):
        x = x + mlp(layer, rms_norm(x, layer["mlp_norm"], cfg.norm_eps, sum_fn))
    return x, carry


def embed(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Embedding rows of `tokens [...]` -> `[..., D]`."""
    return params["embed"][tokens]


def logits_f32(params: dict[str, Any], cfg: ModelConfig, x: jax.Array, sum_fn: SumFn) -> jax.Array:
    """Final norm and output head: `x [..., D]` -> float32 `[..., V]`."""
    with jax.named_scope("logits"):
        normed = rms_norm(x, params["final_norm"], cfg.norm_eps, sum_fn)
        return linear_f32(normed, params["embed"] if cfg.tie_embeddings else params["head"])


def attend_sequence(q: jax.Array, k: jax.Array, v: jax.Array, *, query_block: int = 128) -> jax.Array:
    """Causal attention of whole sequences over themselves, for training: `q [B, T, N, H]`, `k, v [B, T, K, H]`.

    Queries go in blocks that meet only the keys up to their own end, so nearly half of the masked products are never made:

        query_block 2, T 4:   q 0..1 x k 0..1     q 2..3 x k 0..3
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q_f32 = q.astype(jnp.float32).reshape(B, T, K, N // K, H) * np.float32(H**-0.5)
    k_f32, v_f32 = k.astype(jnp.float32), v.astype(jnp.float32)
    attended = []
    for start in range(0, T, query_block):
        end = min(start + query_block, T)
        scores = jnp.einsum("BTKQH,BSKH->BKQTS", q_f32[:, start:end], k_f32[:, :end])
        visible = np.arange(end)[None, :] <= np.arange(start, end)[:, None]
        weights = jax.nn.softmax(jnp.where(visible[None, None, None], scores, -jnp.inf), axis=-1)
        attended.append(jnp.einsum("BKQTS,BSKH->BTKQH", weights, v_f32[:, :end]))
    return jnp.concatenate(attended, axis=1).reshape(B, T, N, H).astype(q.dtype)
