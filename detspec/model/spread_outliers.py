"""Outliers of activations spread over all channels by changing weights alone; in exact numbers the model stays the same.

A few channels of a large model are a hundred times as large as the others, and 8 bits for a row leave nothing of the rest. A
Hadamard transform makes many small numbers of each of them (QuaRot, arXiv 2404.00456). Let `R` be the transform over the root
of its length, which is its own inverse:

    the stream        is `x @ R`: embeddings, o and down write it so, matrices that read it are `W @ R`. A norm commutes with
                      `R` once its scale is folded into these matrices, so norms have scales of 1
    values            heads hold `v @ R`, written so by v and its bias; o is `W @ R` by head
    the MLP's inner   `detspec.integer.spec.spread` transforms it in each pass; down is `W @ R` over the root once more

Sums and differences of float64 in a fixed order: every host gives the same weights.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from detspec.config import ModelConfig
from detspec.integer.spec import block_of, hadamard

WeightChange = Callable[[np.ndarray], np.ndarray]  # of a weight in float64


def in_float64(array: jax.Array) -> np.ndarray:
    """An array of a float type on the host."""
    return np.asarray(array.astype(np.float32)).astype(np.float64)


def spreading(cfg: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """For each of the weights `params` of a model of `cfg`, untied, the change that spreads outliers."""

    def layer_of(weights: dict[str, Any], head_dim: int) -> dict[str, WeightChange]:
        changes: dict[str, WeightChange] = dict.fromkeys(weights, _unchanged)
        changes |= dict.fromkeys(("attn_norm", "mlp_norm"), np.ones_like)
        of_attention = _reading(weights["attn_norm"])
        changes |= dict.fromkeys(("q", "k"), of_attention)
        changes["v"] = lambda x: _by_head(of_attention(x), 0, head_dim)
        if "v_bias" in weights:
            changes["v_bias"] = lambda x: _by_head(x, 0, head_dim)
        changes["o"] = lambda x: rotated(_by_head(x, 1, head_dim), 0)
        changes |= dict.fromkeys(("gate", "up"), _reading(weights["mlp_norm"]))
        changes["down"] = lambda x: rotated(hadamard(x) / block_of(x.shape[1]), 0)
        return changes

    return {
        "embed": lambda x: rotated(x, 1),
        "layers": tuple(
            layer_of(weights, kind.mixer.head_dim) for weights, kind in zip(params["layers"], cfg.layers, strict=True)
        ),
        "final_norm": np.ones_like,
        "head": _reading(params["final_norm"]),
    }


def rotated(x: np.ndarray, axis: int) -> np.ndarray:
    """`x` with an axis transformed by `R`, block by block, see `detspec.integer.spec.hadamard`."""
    last = np.moveaxis(x, axis, -1)
    return np.moveaxis(hadamard(last) / np.sqrt(block_of(last.shape[-1])), -1, axis)


def _unchanged(x: np.ndarray) -> np.ndarray:
    return x


def _reading(scale: jax.Array) -> WeightChange:
    """The change of a matrix that reads the stream after a norm with this `scale [D]`."""
    return lambda x: rotated(x * in_float64(scale), 1)


def _by_head(x: np.ndarray, axis: int, head_dim: int) -> np.ndarray:
    """`x` with an axis of heads transformed head by head."""
    shape = (*x.shape[:axis], -1, head_dim, *x.shape[axis + 1 :])
    return rotated(x.reshape(shape), axis + 1).reshape(x.shape)
