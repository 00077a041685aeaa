"""The parameters of a model: shapes, random values, counts and checks, all from the declared weights."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig, ThinkingConfig
from detspec.errors import InputError
from detspec.model.weights import Weights, weights

Params = dict[str, Any]
WeightsFn = Callable[[ModelConfig], Weights]


def param_shapes(cfg: ModelConfig, *, sharding: Any = None, weights_fn: WeightsFn = weights) -> Params:
    """The pytree of `jax.ShapeDtypeStruct` that `cfg` asks for; every matrix is `[out, in]`, as checkpoints store it.

    `sharding` says where the arrays belong: one `jax.sharding.Sharding` for all, a pytree of them like the parameters, or None.
    `weights_fn` declares the weights of a config.
    """
    tree = weights_fn(cfg)
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    shaped = jax.ShapeDtypeStruct
    return jax.tree.map(lambda leaf, place: shaped(leaf.shape(cfg), cfg.jax_dtype, sharding=place), tree, sharding)


def init_params(cfg: ModelConfig, key: jax.Array, *, weights_fn: WeightsFn = weights) -> Params:
    """Random weights, as each is declared; a thinker and a compressor are copies, see `with_thinking`."""
    if cfg.thinking is not None:
        backbone = dataclasses.replace(cfg, thinking=None)
        return with_thinking(backbone, init_params(backbone, key, weights_fn=weights_fn), cfg.thinking)[1]
    leaves, treedef = jax.tree.flatten(weights_fn(cfg))
    keys = jax.random.split(key, len(leaves))
    arrays = [leaf.init(k, leaf.shape(cfg), cfg).astype(cfg.jax_dtype) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, arrays)


def with_thinking(cfg: ModelConfig, params: Params, thinking: ThinkingConfig) -> tuple[ModelConfig, Params]:
    """The backbone `cfg`, `params` with an untrained thinker and compressor, which are copies of its parts.

    The thinker T is the last layer with the output head, the compressor C is the first layer (Thinking States, section 3).
    """
    thinker = {
        "layer": dict(params["layers"][-1]),
        "final_norm": params["final_norm"],
        "head": params["embed"] if cfg.tie_embeddings else params["head"],
    }
    parts = {"thinker": thinker, "compressor": {"layer": dict(params["layers"][0])}}
    # Copied, because a program that donates the parameters may donate each buffer only once.
    return dataclasses.replace(cfg, thinking=thinking), {**params, "thinking": jax.tree.map(jnp.copy, parts)}


def num_params(cfg: ModelConfig, *, weights_fn: WeightsFn = weights) -> int:
    """Number of weights, a tied head counted once."""
    return sum(math.prod(leaf.shape(cfg)) for leaf in jax.tree.leaves(weights_fn(cfg)))


def active_params(cfg: ModelConfig, *, rows: int = 1, weights_fn: WeightsFn = weights) -> int:
    """Number of weights that a pass over `rows` tokens reads at most; with 1 row, those that each token is multiplied with.

    Only as many experts count as the tokens can choose. An embedding that is not the head is left out: it is not multiplied,
    single rows are looked up. So are the thinker and the compressor, which work between passes.
    """
    left_out = {"thinking"} if cfg.tie_embeddings else {"thinking", "embed"}
    taken = {name: part for name, part in weights_fn(cfg).items() if name not in left_out}
    return sum(leaf.active_size(cfg, rows) for leaf in jax.tree.leaves(taken))


def params_bytes(params: Params) -> int:
    """Bytes of all arrays in `params`."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def check_params(cfg: ModelConfig, params: Params, *, weights_fn: WeightsFn = weights) -> None:
    """Raises `InputError` unless `params` have the tree, shapes and dtypes of the weights of `cfg`."""
    expected = dict(jax.tree.leaves_with_path(param_shapes(cfg, weights_fn=weights_fn)))
    given = dict(jax.tree.leaves_with_path(params))
    missing = [f"{jax.tree_util.keystr(path)} is missing" for path in expected if path not in given]
    unknown = [f"{jax.tree_util.keystr(path)} is unknown" for path in given if path not in expected]
    if missing or unknown:
        raise InputError(f"the weights do not fit the model: {(missing + unknown)[0]}; give weights of the same config")
    for path, like in expected.items():
        leaf = given[path]
        if (like.shape, like.dtype) != (leaf.shape, leaf.dtype):
            raise InputError(
                f"weight {jax.tree_util.keystr(path)} has shape {leaf.shape} and dtype {leaf.dtype}, the model's has "
                f"{like.shape} and {like.dtype}; give weights of the same config"
            )
