"""A Llama decoder in plain PyTorch: the library's products, attention and norm, a static cache, one token a sequence a step.

It stands for a careful program without kernels of its own. Queries, keys and values are one product, and so are gate and up.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from detspec.config import ModelConfig
from detspec.ops.rope import rope_frequencies

LayerCache = tuple[Tensor, Tensor]  # keys and values, each [B, K, S, H]


@dataclasses.dataclass(frozen=True)
class TorchLayer:
    """The weights of one layer; matrices are `[out, in]`."""

    attn_norm: Tensor  # [D]
    qkv: Tensor  # [(N + 2K) * H, D]
    o: Tensor  # [D, N * H]
    mlp_norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]
    down: Tensor  # [D, F]


@dataclasses.dataclass(frozen=True)
class TorchLlama:
    """A model: its shape, its weights, and cosines and sines of its rotary angles."""

    cfg: ModelConfig
    embed: Tensor  # [V, D]
    layers: Sequence[TorchLayer]
    final_norm: Tensor  # [D]
    head: Tensor  # [V, D]
    rotations: Tensor  # [2, S, H] float32, see `rotations_of`


def step(model: TorchLlama, cache: Sequence[LayerCache], tokens: Tensor, position: int) -> Tensor:
    """Logits `[B, V]` after `tokens [B]` (int64) at `position`, the same in all sequences; writes their keys and values.

    Attention reads the slots up to `position`, without a mask, which PyTorch's fastest kernel does not take.
    """
    cfg = model.cfg
    x = F.embedding(tokens, model.embed)
    for layer, layer_cache in zip(model.layers, cache, strict=True):
        heads = F.linear(norm(cfg, x, layer.attn_norm), layer.qkv).view(len(tokens), -1, cfg.layer(0).mixer.head_dim)
        attended = attention(cfg, heads, model.rotations[:, position], layer_cache, position)
        x = x + F.linear(attended, layer.o)
        gate, up = F.linear(norm(cfg, x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    return F.linear(norm(cfg, x, model.final_norm), model.head)


def norm(cfg: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of `x [B, D]`."""
    return F.rms_norm(x, weight.shape, weight, cfg.norm_eps)


def attention(cfg: ModelConfig, heads: Tensor, rotation: Tensor, cache: LayerCache, position: int) -> Tensor:
    """Attention of `heads [B, N + 2K, H]` over the cache up to `position`, which it writes: `[B, N * H]`."""
    mixer = cfg.layer(0).mixer
    keys, values = cache
    rotated_f32 = rotate(heads, rotation)  # values, too, which nothing reads: `roll` would copy a part before it rolls it
    q_f32, k_f32, _ = rotated_f32.split([mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads], dim=1)
    keys[:, :, position] = k_f32
    values[:, :, position] = heads[:, -mixer.num_kv_heads :]
    seen = slice(position + 1)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # or an error: it never falls back to a slow one
        attended = F.scaled_dot_product_attention(
            q_f32.to(heads.dtype)[:, :, None], keys[:, :, seen], values[:, :, seen], scale=mixer.scores.scale, enable_gqa=True
        )
    return attended.reshape(len(heads), -1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates `x [B, heads, H]` by `rotation [2, H]`: float32."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rotations_of(cfg: ModelConfig, max_len: int, device: torch.device) -> Tensor:
    """Cosines and signed sines `[2, S, H]`, float32, such that half-split pairs need one roll:

    x          = [a0 a1 b0 b1]
    x.roll(2)  = [b0 b1 a0 a1]
    rotated    = x * [c0 c1 c0 c1] + x.roll(2) * [-s0 -s1 s0 s1]
    """
    mixer = cfg.layer(0).mixer
    frequencies = rope_frequencies(mixer.head_dim, mixer.rope.theta, mixer.rope.scaling)
    angles = np.arange(max_len, dtype=np.float32)[:, None] * frequencies
    sines = np.sin(angles)
    halves = [[np.cos(angles)] * 2, [-sines, sines]]
    return torch.from_numpy(np.stack([np.concatenate(half, axis=-1) for half in halves])).to(device)


def random_llama(cfg: ModelConfig, max_len: int, device: torch.device) -> TorchLlama:
    """A model of random weights in `cfg.dtype`; matrices have deviation `1/sqrt(in)`."""
    ff = cfg.layer(0).ff
    mixer = cfg.layer(0).mixer
    generator = torch.Generator(device).manual_seed(0)
    like = {"dtype": getattr(torch, cfg.dtype), "device": device}

    def matrix(num_out: int, num_in: int, deviation: float | None = None) -> Tensor:
        return torch.randn(num_out, num_in, generator=generator, **like).mul_(deviation or num_in**-0.5)

    def layer() -> TorchLayer:
        q_width = mixer.num_heads * mixer.head_dim
        kv_width = mixer.num_kv_heads * mixer.head_dim
        return TorchLayer(
            attn_norm=torch.ones(cfg.d_model, **like),
            qkv=matrix(q_width + 2 * kv_width, cfg.d_model),
            o=matrix(cfg.d_model, q_width),
            mlp_norm=torch.ones(cfg.d_model, **like),
            gate_up=matrix(2 * ff.d_ff, cfg.d_model),
            down=matrix(cfg.d_model, ff.d_ff),
        )

    return TorchLlama(
        cfg,
        embed=matrix(cfg.vocab_size, cfg.d_model, 1.0),
        layers=[layer() for _ in range(cfg.num_layers)],
        final_norm=torch.ones(cfg.d_model, **like),
        head=matrix(cfg.vocab_size, cfg.d_model),
        rotations=rotations_of(cfg, max_len, device),
    )


def random_cache(cfg: ModelConfig, batch: int, max_len: int, device: torch.device) -> list[LayerCache]:
    """Random keys and values of each layer, in `cfg.dtype`."""
    mixer = cfg.layer(0).mixer
    generator = torch.Generator(device).manual_seed(1)
    shape = (batch, mixer.num_kv_heads, max_len, mixer.head_dim)
    like = {"dtype": getattr(torch, cfg.dtype), "device": device, "generator": generator}
    return [(torch.randn(shape, **like), torch.randn(shape, **like)) for _ in range(cfg.num_layers)]
