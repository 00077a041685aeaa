"""Outliers of activations spread over all channels by changing weights alone; in exact numbers the model stays the same.

A few channels of a large model are a hundred times as large as the others, and 8 bits for a row leave nothing of the rest. A
Hadamard transform makes many small numbers of each of them (QuaRot, arXiv 2404.00456). Let `R` be the transform over the root
of its length, which is its own inverse:

    the stream        is `x @ R`: embeddings, o and down write it so, matrices that read it are `W @ R`. A norm commutes with
                      `R` once its scale is folded into these matrices, so norms have scales of 1
    norms after a     have scales that nothing behind them takes. So o and down write what they do without `R`, and each pass
    part              transforms what the norm makes of it, by `spread`; the root of the length is in the norm's scale
    values            heads hold `v @ R`, written so by v and its bias; o is `W @ R` by head
    the MLP's inner   `detspec.integer.spec.spread` transforms it in each pass; down is `W @ R` over the root once more

Sums and differences of float64 in a fixed order: every host gives the same weights.
"""

from typing import Any

import numpy as np

from detspec.config import ModelConfig
from detspec.integer.spec import block_of, hadamard
from detspec.model.fold_scales import WeightChange, in_float64, unchanged


def spreading(cfg: ModelConfig, params: dict[str, Any], folded: dict[str, Any]) -> dict[str, Any]:
    """For each of the weights `params` of a model of `cfg`, untied, the change that spreads outliers.

    The changes `folded` come before, see `detspec.model.fold_scales`.
    """

    def reading(weights: dict[str, Any], changes: dict[str, Any], norm: str) -> WeightChange:
        """The change of a matrix that reads the stream, after a norm if there is one."""
        scale = changes[norm](in_float64(weights[norm])) if norm in weights else 1.0
        return lambda x: rotated(x * scale, 1)

    def layer_of(weights: dict[str, Any], before: dict[str, Any], kind: Any) -> dict[str, WeightChange]:
        head_dim = kind.mixer.head_dim
        changes: dict[str, WeightChange] = dict.fromkeys(weights, unchanged)
        changes |= {name: np.ones_like for name in ("attn_norm", "mlp_norm") if name in weights}
        changes |= {name: _over_root for name in ("attn_post_norm", "mlp_post_norm") if name in weights}
        written = unchanged if kind.post_norms else lambda x: rotated(x, 0)
        of_attention = reading(weights, before, "attn_norm")
        changes |= dict.fromkeys(("q", "k"), of_attention)
        changes["v"] = lambda x: _by_head(of_attention(x), 0, head_dim)
        if "v_bias" in weights:
            changes["v_bias"] = lambda x: _by_head(x, 0, head_dim)
        changes["o"] = lambda x: written(_by_head(x, 1, head_dim))
        changes |= dict.fromkeys(("gate", "up"), reading(weights, before, "mlp_norm"))
        changes["down"] = lambda x: written(hadamard(x) / block_of(x.shape[1]))
        return changes

    return {
        "embed": lambda x: rotated(x, 1),
        "layers": tuple(map(layer_of, params["layers"], folded["layers"], cfg.layers)),
        "final_norm": np.ones_like,
        "head": reading(params, folded, "final_norm"),
    }


def rotated(x: np.ndarray, axis: int) -> np.ndarray:
    """`x` with an axis transformed by `R`, block by block, see `detspec.integer.spec.hadamard`."""
    last = np.moveaxis(x, axis, -1)
    return np.moveaxis(hadamard(last) / np.sqrt(block_of(last.shape[-1])), -1, axis)


def _over_root(x: np.ndarray) -> np.ndarray:
    """The scale of a norm whose result `spread` transforms."""
    return x / np.sqrt(block_of(len(x)))


def _by_head(x: np.ndarray, axis: int, head_dim: int) -> np.ndarray:
    """`x` with an axis of heads transformed head by head."""
    shape = (*x.shape[:axis], -1, head_dim, *x.shape[axis + 1 :])
    return rotated(x.reshape(shape), axis + 1).reshape(x.shape)
