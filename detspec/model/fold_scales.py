"""Scales of a model in floats folded into its weights, in float64 on the host; in exact numbers the model stays the same.

    norms        `1 + w` where a model multiplies by that (Gemma)
    embeddings   times their scale: the root of the width (Gemma), or a number (Granite); the head of a tied model is not
    parts        the norm after a part, or else o and down, times the scale of what is added to the stream (Granite)
    logits       the head over their divisor (Granite)

So passes of integers have none of these operations.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig

WeightChange = Callable[[np.ndarray], np.ndarray]  # of a weight in float64


def in_float64(array: jax.Array) -> np.ndarray:
    """An array of a float type on the host."""
    return np.asarray(array.astype(np.float32)).astype(np.float64)


def unchanged(x: np.ndarray) -> np.ndarray:
    """The change that leaves a weight as it is."""
    return x


def times(factor: float | None) -> WeightChange:
    """The change of a weight that is multiplied; None leaves it."""
    return unchanged if factor is None else lambda x: x * factor


def folding(cfg: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """For each of the weights `params` of a model of `cfg`, untied, the change that folds scales into it."""
    of_norm = (lambda x: 1 + x) if cfg.norm_plus_one else unchanged

    def layer_of(weights: dict[str, Any], kind: Any) -> dict[str, WeightChange]:
        changes = {name: of_norm if name.endswith("_norm") else unchanged for name in weights}
        of_part = times(kind.residual_scale)
        if kind.post_norms:
            changes |= dict.fromkeys(("attn_post_norm", "mlp_post_norm"), lambda x: of_part(of_norm(x)))
        else:
            changes |= dict.fromkeys(("o", "down"), of_part)
        return changes

    return {
        "embed": times(embedding_scale(cfg)),
        "layers": tuple(layer_of(weights, kind) for weights, kind in zip(params["layers"], cfg.layers, strict=True)),
        "final_norm": of_norm,
        "head": times(None if cfg.logit_divisor is None else 1 / cfg.logit_divisor),
    }


def embedding_scale(cfg: ModelConfig) -> float | None:
    """The number that embeddings are multiplied by, rounded as the model in floats has it; None if there is none."""
    scale = cfg.embed_scale
    if cfg.scale_embeddings:
        scale = (1.0 if scale is None else scale) * float(jnp.asarray(math.sqrt(cfg.d_model), cfg.jax_dtype))
    return scale
