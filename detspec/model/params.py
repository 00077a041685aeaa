"""The parameters of a model: shapes, random values, counts, checks and work of a pass, all from what is declared."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig, ThinkingConfig
from detspec.errors import InputError
from detspec.integer.spec import IntMatrix, Scale
from detspec.model.to_integer import float_config, integer_params
from detspec.model.weights import Weight, weights
from detspec.ops.linear.int8 import QTensor, quantize
from detspec.roofline import PassShape, Work
from detspec.schedule import Schedule

Params = dict[str, Any]


def param_shapes(cfg: ModelConfig, *, sharding: Any = None) -> Params:
    """The pytree of `jax.ShapeDtypeStruct` that `cfg` asks for; every matrix is `[out, in]`, as checkpoints store it.

    Where matrices are rounded, each is a `QTensor` of these; in an integer model an `IntMatrix`, and scales of norms a `Scale`.

    `sharding` says where the arrays belong: one `jax.sharding.Sharding` for all, a pytree of them like the parameters, or None.
    """
    tree = weights(cfg)
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)

    def shaped(leaf: Weight, place: Any) -> Any:
        array = partial(jax.ShapeDtypeStruct, sharding=place)
        shape = leaf.shape
        if cfg.is_integer:
            if leaf.is_scale:
                return Scale(array(shape, jnp.int32), array((), jnp.int32))  # type: ignore[arg-type]
            if not leaf.is_matrix:
                return array(shape, jnp.int32)
            rows = array(shape[:-1], jnp.int32)
            return IntMatrix(array(shape, jnp.int8), rows, rows)  # type: ignore[arg-type]
        if cfg.weights is None or not leaf.is_matrix:
            return array(shape, leaf.dtype(cfg))
        return QTensor(array(shape, jnp.int8), array(shape[:-1], jnp.float32))  # type: ignore[arg-type]

    return jax.tree.map(shaped, tree, sharding)


def init_params(cfg: ModelConfig, key: jax.Array) -> Params:
    """Random weights, as each is declared; a thinker and a compressor are copies, see `with_thinking`.

    Rounded ones, and integers, are made of those of the same model in `cfg.dtype`.
    """
    if cfg.activation_bits is not None:
        full = float_config(cfg)
        return integer_params(full, init_params(full, key), cfg.activation_bits)
    if cfg.weights is not None:
        full = dataclasses.replace(cfg, weights=None)
        return quantized(init_params(full, key), full)
    if cfg.thinking is not None:
        backbone = dataclasses.replace(cfg, thinking=None)
        return with_thinking(backbone, init_params(backbone, key), cfg.thinking)[1]
    leaves, treedef = jax.tree.flatten(weights(cfg))
    keys = jax.random.split(key, len(leaves))
    arrays = [leaf.init(k, leaf.shape, cfg).astype(leaf.dtype(cfg)) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, arrays)


def quantized(params: Params, cfg: ModelConfig, *, free: bool = False) -> Params:
    """`params` in `cfg.dtype` with every matrix rounded to int8 by row, as models with `cfg.weights == "int8"` have them.

    A tied head becomes a rounded copy of the embedding; all else is the same arrays. May be jitted. On a mesh each chip rounds
    what it holds, because a row lies whole on one chip. A row that is not finite gets a scale of nan, and nan as its output.

    With `free`, which cannot be jitted, each matrix is deleted as soon as it is rounded: `params` are of no use afterwards.
    """
    if cfg.tie_embeddings:
        params = {**params, "head": params["embed"]}

    def rounded(leaf: Weight, array: jax.Array) -> Any:
        if not leaf.is_matrix:
            return array
        found = _quantize(array)
        if free and array is not params["embed"]:
            jax.block_until_ready(found)
            array.delete()
        return found

    return jax.tree.map(rounded, weights(dataclasses.replace(cfg, weights="int8")), params)


def fitted(params: Params, cfg: ModelConfig, float_cfg: ModelConfig | None = None) -> Params:
    """`params` as a model of `cfg` runs them: those in `cfg.dtype` are rounded, or turned into integers, if it asks for that.

    An integer model's weights in floats are those of `float_cfg`, see `Model.float_cfg`.

    Raises `InputError` unless they have the tree, shapes and dtypes of its weights, rounded or not.
    """
    if cfg.activation_bits is not None and not any(map(_is_integer, jax.tree.leaves(params, is_leaf=_is_integer))):
        if float_cfg is None:
            raise InputError(
                "this integer model was made in memory, and does not know the config that weights in floats are of: give "
                "weights in integers, as detspec.model.to_integer.integer_params makes them, or set Model.float_cfg"
            )
        check_params(float_cfg, params)
        return integer_params(float_cfg, params, cfg.activation_bits)
    if cfg.weights != "int8" or any(map(_is_rounded, jax.tree.leaves(params, is_leaf=_is_rounded))):
        check_params(cfg, params)
        return params
    full = dataclasses.replace(cfg, weights=None)
    check_params(full, params)
    return quantized(params, full)


def _is_rounded(node: Any) -> bool:
    return isinstance(node, QTensor)


def _is_integer(node: Any) -> bool:
    return isinstance(node, IntMatrix)


_quantize = jax.jit(quantize)  # matrices of one shape share a program


def with_thinking(cfg: ModelConfig, params: Params, thinking: ThinkingConfig) -> tuple[ModelConfig, Params]:
    """The backbone `cfg`, `params` with an untrained thinker and compressor, which are copies of its parts.

    The thinker T is the last layer with the output head, the compressor C is the first layer (Thinking States, section 3).
    """
    thinker = {
        "layer": dict(params["layers"][-1]),
        **{name: leaf for name, leaf in params.items() if name.startswith("final_norm")},
        "head": params["head"] if "head" in params else params["embed"],
    }
    parts = {"thinker": thinker, "compressor": {"layer": dict(params["layers"][0])}}
    # Copied, because a program that donates the parameters may donate each buffer only once.
    return dataclasses.replace(cfg, thinking=thinking), {**params, "thinking": jax.tree.map(jnp.copy, parts)}


def num_params(cfg: ModelConfig) -> int:
    """Number of weights, a tied head counted once."""
    cfg = dataclasses.replace(cfg, weights=None)  # a rounded head is the embedding's once more
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights(cfg)))


def active_params(cfg: ModelConfig, *, rows: int = 1) -> int:
    """Number of weights that a pass over `rows` tokens reads at most; with 1 row, those that each token is multiplied with.

    Only as many experts count as the tokens can choose. An embedding that is not the head is left out: it is not multiplied,
    single rows are looked up. So are a table of positions, and the thinker and the compressor, which work between passes.
    """
    return sum(leaf.active_size(rows) for leaf in _active(cfg))


def active_bytes(cfg: ModelConfig, *, rows: int = 1) -> int:
    """Bytes of the `active_params` of a pass over `rows` tokens, scales of rounded ones left out."""
    return sum(
        leaf.active_size(rows) * (1 if cfg.weights is not None and leaf.is_matrix else leaf.dtype(cfg).itemsize)
        for leaf in _active(cfg)
    )


def _active(cfg: ModelConfig) -> list[Weight]:
    tree = weights(cfg)
    left_out = {"thinking", "positions", *(["embed"] if "head" in tree else [])}
    return jax.tree.leaves({name: part for name, part in tree.items() if name not in left_out})


def params_bytes(params: Params) -> int:
    """Bytes of all arrays in `params`."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def check_params(cfg: ModelConfig, params: Params) -> None:
    """Raises `InputError` unless `params` have the tree, shapes and dtypes of the weights of `cfg`."""
    expected = dict(jax.tree.leaves_with_path(param_shapes(cfg)))
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


def pass_work(cfg: ModelConfig, schedule: Schedule, *, windows: int, context: int, chips: int = 1) -> Work:
    """The work of one pass of `schedule.budget.rows` token rows; on several chips, that of each. See `PassShape`.

    Active weights are read once and multiplied with every row, rows of padding too. Layers add what their mixers read and
    multiply. Logits are written and read once, in float32. Activations, new keys and values, and sampling are left out.

    A chip multiplies for its own outputs and heads, and samples its share of the rows.
    """
    shape = PassShape(schedule, windows, context, chips)
    rows = schedule.budget.rows
    mixed = [layer.mixer.work(shape) for layer in cfg.layers]
    return Work(
        bytes=(active_bytes(cfg, rows=rows) + 2 * 4 * rows * cfg.vocab_size) / chips + sum(work.bytes for work in mixed),
        flop=2 * rows * active_params(cfg) / chips + sum(work.flop for work in mixed),
    )
