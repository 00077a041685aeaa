"""The parameter pytree: which weights a config asks for, their shapes, and random ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig, ThinkingConfig
from detspec.errors import InputError

Params = dict[str, Any]


def param_shapes(cfg: ModelConfig) -> Params:
    """The pytree of `jax.ShapeDtypeStruct` that `cfg` asks for; every matrix is `[out, in]`, as checkpoints store it.

    `{"embed": [V, D], "layers": ({"attn_norm": [D], "q": [N*H, D], "k": [K*H, D], "v": [K*H, D], "o": [D, N*H],
    "mlp_norm": [D], "gate": [F, D], "up": [F, D], "down": [D, F]}, ...), "final_norm": [D], "head": [V, D]}`;
    no `"head"` when the embedding is tied. As the config asks, a layer also has `"q_bias": [N*H]`, `"k_bias", "v_bias": [K*H]`,
    `"o_bias": [D]`, `"q_norm", "k_norm": [H]`, and `"attn_post_norm", "mlp_post_norm": [D]`. A model that thinks has
    `"thinking": {"thinker": {"layer": {...}, "final_norm": [D], "head": [V, D]}, "compressor": {"layer": {...}}}` too.
    """

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, cfg.jax_dtype)

    D, F, V = cfg.d_model, cfg.d_ff, cfg.vocab_size
    NH, KH = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    layer = {
        "attn_norm": weight(D),
        "q": weight(NH, D),
        "k": weight(KH, D),
        "v": weight(KH, D),
        "o": weight(D, NH),
        "mlp_norm": weight(D),
        "gate": weight(F, D),
        "up": weight(F, D),
        "down": weight(D, F),
    }
    if cfg.qkv_bias:
        layer |= {"q_bias": weight(NH), "k_bias": weight(KH), "v_bias": weight(KH)}
    if cfg.o_bias:
        layer |= {"o_bias": weight(D)}
    if cfg.qk_norm:
        layer |= {"q_norm": weight(cfg.head_dim), "k_norm": weight(cfg.head_dim)}
    if cfg.post_norms:
        layer |= {"attn_post_norm": weight(D), "mlp_post_norm": weight(D)}
    shapes: Params = {
        "embed": weight(V, D),
        "layers": tuple(dict(layer) for _ in range(cfg.num_layers)),
        "final_norm": weight(D),
    }
    if not cfg.tie_embeddings:
        shapes["head"] = weight(V, D)
    if cfg.thinking is not None:
        thinker = {"layer": dict(layer), "final_norm": weight(D), "head": weight(V, D)}
        shapes["thinking"] = {"thinker": thinker, "compressor": {"layer": dict(layer)}}
    return shapes


def with_thinking(cfg: ModelConfig, params: Params, thinking: ThinkingConfig) -> tuple[ModelConfig, Params]:
    """A model that thinks, from the backbone `cfg`, `params`: untrained, the thinker and the compressor as copies.

    The thinker T is the last layer with the output head, the compressor C is the first layer (Thinking States, section 3).
    """
    thinker = {
        "layer": dict(params["layers"][-1]),
        "final_norm": params["final_norm"],
        "head": params["embed"] if cfg.tie_embeddings else params["head"],
    }
    parts = {"thinker": thinker, "compressor": {"layer": dict(params["layers"][0])}}
    # Buffers of their own, so that whoever donates the parameters donates each once.
    return dataclasses.replace(cfg, thinking=thinking), {**params, "thinking": jax.tree.map(jnp.copy, parts)}


def init_params(cfg: ModelConfig, key: jax.Array) -> Params:
    """Random weights: norms 1 (or 0 where one is added), biases 0, matrices normal with deviation `1/sqrt(in)`.

    The two residual outputs, `o` and `down`, are divided by `sqrt(2 L)`.
    The embedding's deviation is `1/sqrt(D)` when it is also the head, else 1. A thinker and a compressor are copies, see
    `with_thinking`.
    """
    if cfg.thinking is not None:
        backbone = dataclasses.replace(cfg, thinking=None)
        return with_thinking(backbone, init_params(backbone, key), cfg.thinking)[1]
    leaves, treedef = jax.tree.flatten_with_path(param_shapes(cfg))
    keys = jax.random.split(key, len(leaves))

    def init(path: Any, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        name = path[-1].key
        if len(leaf.shape) == 1:
            return jnp.full(leaf.shape, 0 if name.endswith("_bias") or cfg.norm_plus_one else 1, leaf.dtype)
        deviation = 1.0 if name == "embed" and not cfg.tie_embeddings else leaf.shape[1] ** -0.5
        if name in ("o", "down"):
            deviation /= (2 * cfg.num_layers) ** 0.5
        return (jax.random.normal(key, leaf.shape, jnp.float32) * np.float32(deviation)).astype(leaf.dtype)

    return jax.tree.unflatten(treedef, [init(path, leaf, k) for (path, leaf), k in zip(leaves, keys, strict=True)])


def params_bytes(params: Params) -> int:
    """Bytes of all arrays in `params`."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def check_params(cfg: ModelConfig, params: Params) -> None:
    """Raises `InputError` unless `params` have the tree, shapes and dtypes of the weights of `cfg`."""
    expected = dict(jax.tree.leaves_with_path(param_shapes(cfg)))
    given = dict(jax.tree.leaves_with_path(params))
    odd = sorted(map(jax.tree_util.keystr, expected.keys() ^ given.keys()))
    if odd:
        raise InputError(f"the weights are not those of the model: {odd[0]} is in one of them alone")
    for path, like in expected.items():
        leaf = given[path]
        if (like.shape, like.dtype) != (leaf.shape, leaf.dtype):
            raise InputError(
                f"weight {jax.tree_util.keystr(path)} has shape {leaf.shape} and dtype {leaf.dtype}, the model's has "
                f"{like.shape} and {like.dtype}"
            )
