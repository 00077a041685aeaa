"""Weights in another dtype."""

import dataclasses

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.params import Params


def cast_params(cfg: ModelConfig, params: Params, dtype: str) -> tuple[ModelConfig, Params]:
    """`cfg` and `params` in `dtype`; the very same if it is theirs; `InputError` if a weight is too large for `dtype`."""
    if dtype == cfg.dtype:
        return cfg, params
    cfg = dataclasses.replace(cfg, dtype=dtype)

    def cast(path: tuple[jax.tree_util.KeyEntry, ...], leaf: jax.Array) -> jax.Array:
        smaller = leaf.astype(cfg.jax_dtype)
        if not bool(jnp.isfinite(smaller).all()):
            raise InputError(f"weights {jax.tree_util.keystr(path)} hold numbers too large for {dtype}")
        return smaller

    return cfg, jax.tree.map_with_path(cast, params)
