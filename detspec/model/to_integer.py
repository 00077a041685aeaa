"""From a model in floats to one in integers, once, on the host: single operations that IEEE 754 rounds alike everywhere."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.integer import spec
from detspec.integer.spec import FRACTION, LIMIT, IntMatrix, Scale
from detspec.model.attention import Attention
from detspec.model.fold_scales import WeightChange, folding, in_float64, unchanged, unit_of_stream
from detspec.model.integer import NOT_INTEGER, IntegerAttention, IntegerMLP
from detspec.model.integer_rows import CAPS, SOFT_CAPS, fixed_epsilon, soft_cap_of
from detspec.model.layers import Layer
from detspec.model.mlp import GatedMLP
from detspec.model.order_rotations import ordering
from detspec.model.spread_outliers import spreading
from detspec.model.weights import Weight, weights

Params = dict[str, Any]
LEAST = 2.0**-40  # rows without a larger magnitude are zeros
MAX_WIDTH = 32_768
MAX_VOCABULARY = 524_160  # of equal logits: the sum of so many weights has an upper word of 32 bits


def integer_config(cfg: ModelConfig, activation_bits: int = 15) -> ModelConfig:
    """`cfg` with layers in integers, and activations of 15 or 8 bits.

    It has no scales of embeddings, parts and logits, which its weights have in them, see `detspec.model.fold_scales`.

    Raises `InputError` naming the first thing that integer models do not have.
    """
    kinds = tuple(_integer_layer(kind) for kind in cfg.kinds)
    mixers: list[Any] = [kind.mixer for kind in kinds]
    widths = [512, cfg.d_model, *(mixer.num_heads * mixer.head_dim for mixer in mixers if mixer.has_wide_norms)]
    for lacks, what in (
        (cfg.thinking is not None, "thoughts"),
        (cfg.norm != "rms" or cfg.norm_bias, "LayerNorm"),
        (cfg.logit_softcap is not None and not CAPS[0] <= cfg.logit_softcap <= CAPS[1], SOFT_CAPS.format("logits")),
        (cfg.learned_positions, "learned positions"),
        (cfg.weights is not None, "matrices that were rounded before"),
        (cfg.d_model > MAX_WIDTH, f"streams wider than {MAX_WIDTH}"),
        (cfg.vocab_size > MAX_VOCABULARY, f"vocabularies larger than {MAX_VOCABULARY}"),
        (fixed_epsilon(cfg.norm_eps) * max(widths) >= 2**31, f"norms with an epsilon of {cfg.norm_eps}"),
    ):
        if lacks:
            raise InputError(NOT_INTEGER.format(what))
    max_position = min(cfg.max_position, spec.MAX_POSITIONS)
    weights = "integer8" if activation_bits == 8 else "integer"
    epsilon = cfg.norm_eps / unit_of_stream(cfg) ** 2
    folded: dict[str, Any] = {
        "norm_eps": epsilon,
        "norm_plus_one": False,
        "scale_embeddings": False,
        "embed_scale": None,
        "logit_divisor": None,
    }
    return dataclasses.replace(cfg, kinds=kinds, weights=weights, max_position=max_position, **folded)


def with_weights(cfg: ModelConfig, weights: str | None) -> ModelConfig:
    """`cfg` of a model in floats with weights of that kind, see `ModelConfig.weights`."""
    rounded = dataclasses.replace(cfg, weights=weights)
    return rounded if rounded.activation_bits is None else integer_config(cfg, rounded.activation_bits)


def float_config(cfg: ModelConfig) -> ModelConfig:
    """The config in floats whose weights `cfg`, an integer model's, can be made of: without scales that they have in them."""
    kinds = tuple(
        dataclasses.replace(kind, mixer=_like(Attention, kind.mixer), ff=_like(GatedMLP, kind.ff)) for kind in cfg.kinds
    )
    return dataclasses.replace(cfg, kinds=kinds, weights=None)


def _like(kind: type[Any], value: Any) -> Any:
    """Makes a `kind` of the fields that `value`, of another class, has by the same names."""
    return kind(**{field.name: getattr(value, field.name) for field in dataclasses.fields(kind)})


def _integer_layer(layer: Layer) -> Layer:
    if type(layer.mixer) is not Attention or type(layer.ff) is not GatedMLP:
        raise InputError(NOT_INTEGER.format(f"{type(layer.mixer).__name__} with {type(layer.ff).__name__}"))
    if layer.parallel:
        raise InputError(NOT_INTEGER.format("layers whose attention and MLP are parallel"))
    parts = {"mixer": _like(IntegerAttention, layer.mixer), "ff": _like(IntegerMLP, layer.ff)}
    return dataclasses.replace(layer, **parts, residual_scale=None)


def integer_params(cfg: ModelConfig, params: Params, activation_bits: int = 15) -> Params:
    """The weights of `integer_config(cfg, activation_bits)`, of those `params` in floats of a model of `cfg`.

    Scales are folded into them, see `detspec.model.fold_scales`. With activations of 8 bits, outliers are spread then, see
    `detspec.model.spread_outliers`.
    """
    if cfg.tie_embeddings:
        params = {**params, "head": params["embed"]}
    declared = weights(integer_config(cfg, activation_bits))

    def converted(path: Any, leaf: Weight, array: jax.Array, *changes: WeightChange) -> Any:
        name = jax.tree_util.keystr(path)
        x = in_float64(array)
        if not np.isfinite(x).all():
            raise InputError(f"weight {name} has numbers that are not finite")
        for change in changes:
            x = change(x)
        return _leaf(name, leaf, x)

    folded = folding(cfg, params)
    changes = (folded, _in_order(cfg, params), *((spreading(cfg, params, folded),) if activation_bits == 8 else ()))
    found = jax.tree.map_with_path(converted, declared, params, *changes)
    return jax.tree.map(jnp.asarray, found)


def _in_order(cfg: ModelConfig, params: Params) -> Params:
    """For each of the weights `params`, the change that puts heads into the order of `detspec.model.order_rotations`."""
    found = jax.tree.map(lambda _: unchanged, params)
    for layer, changes, kind in zip(params["layers"], found["layers"], cfg.layers, strict=True):
        changes.update(ordering(kind.mixer, layer))
    return found


def _leaf(name: str, leaf: Weight, x: np.ndarray) -> Any:
    if leaf.is_matrix:
        return _matrix(x)
    if leaf.is_scale:
        return _scale(name, x)
    numbers = np.rint(x * 2.0**FRACTION)
    if np.abs(numbers).max(initial=0) >= LIMIT:
        raise InputError(f"weight {name} has numbers beyond 16383, which integer models cannot hold")
    return numbers.astype(np.int32)


def _matrix(x: np.ndarray) -> IntMatrix:
    largest = np.abs(x).max(-1)
    fraction, exponent = np.frexp(np.maximum(largest, LEAST) / 127)
    mantissa = np.rint(fraction * 2.0**15)
    exponent = exponent - 15
    step = np.ldexp(mantissa, exponent)
    values = np.clip(np.rint(x / step[:, None]), -127, 127)
    values = np.where(largest[:, None] < LEAST, 0, values)
    return IntMatrix(values.astype(np.int8), mantissa.astype(np.int32), exponent.astype(np.int32))


def _scale(name: str, x: np.ndarray) -> Scale:
    x = x * math.sqrt(len(x))
    _, exponent = np.frexp(max(np.abs(x).max(), LEAST))
    values = np.rint(np.ldexp(x, 14 - exponent))
    return Scale(values.astype(np.int32), np.asarray(exponent - 14, np.int32))


def spec_model(cfg: ModelConfig, params: Params) -> tuple[dict[str, Any], spec.Sizes]:
    """An integer model of `cfg` as `detspec.integer.spec.Text` takes it: weights in numpy, and what they do not show."""
    mixers = [layer.mixer for layer in cfg.layers]
    first = mixers[0]
    assert cfg.activation_bits is not None, "a model in floats"
    shapes = {(mixer.num_heads, mixer.num_kv_heads, mixer.score_scale_of_two(), mixer.has_wide_norms) for mixer in mixers}
    if len(shapes) > 1 or len({layer.ff.activation for layer in cfg.layers}) > 1:
        raise InputError("oracles take models whose layers have the same heads, scale and soft cap of scores, and activation")
    score = first.score_scale_of_two()
    shape = spec.Sizes(
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        score_mantissa=score.mantissa,
        score_exponent=score.exponent,
        epsilon=fixed_epsilon(cfg.norm_eps),
        steps=tuple(tuple(mixer.steps) for mixer in mixers),
        windows=tuple(mixer.window for mixer in mixers),
        activation_bits=cfg.activation_bits,
        activation=cfg.layer(0).ff.activation,
        score_cap=score.cap,
        logit_cap=soft_cap_of(cfg.logit_softcap),
    )
    wide = jax.tree.map(lambda leaf: np.asarray(leaf) if leaf.dtype == jnp.int8 else np.asarray(leaf, np.int64), params)
    return wide, shape
