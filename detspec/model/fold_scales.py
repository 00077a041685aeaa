"""Scales of a model in floats folded into its weights, in float64 on the host; in exact numbers the model stays the same.

    norms        `1 + w` where a model multiplies by that (Gemma)
    embeddings   times their scale: the root of the width (Gemma), or a number (Granite); the head of a tied model is not
    parts        the norm after a part, or else o and down, times the scale of what is added to the stream (Granite)
    logits       the head over their divisor (Granite)
    the stream   embeddings and parts over `unit_of_stream`: norms give the same with an epsilon over its square

So passes of integers have none of these operations.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig

UNIT = 64.0
WeightChange = Callable[[np.ndarray], np.ndarray]  # of a weight in float64


def in_float64(array: jax.Array) -> np.ndarray:
    """An array of a float type on the host."""
    return np.asarray(array.astype(np.float32)).astype(np.float64)


def unchanged(x: np.ndarray) -> np.ndarray:
    """The change that leaves a weight as it is."""
    return x


def times(factor: float | None) -> WeightChange:
    """The change of a weight that is multiplied; None leaves it."""
    return unchanged if factor in (None, 1) else lambda x: x * factor


def unit_of_stream(cfg: ModelConfig) -> float:
    """The value of 1 in the stream of an integer model: streams of models that scale embeddings may be beyond 16,384.

    Gemma 3's leave float16 (https://github.com/huggingface/transformers/issues/36822). Then they may be up to 1,048,575, in
    steps of 1 / 1024. Norms of queries, keys and parts take the smaller epsilon, too.
    """
    return UNIT if cfg.scale_embeddings else 1.0


def folding(cfg: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """For each of the weights `params` of a model of `cfg`, untied, the change that folds scales into it."""
    of_norm = (lambda x: 1 + x) if cfg.norm_plus_one else unchanged

    def layer_of(weights: dict[str, Any], kind: Any) -> dict[str, WeightChange]:
        changes = {name: of_norm if name.endswith("_norm") else unchanged for name in weights}
        of_part = times(_or_1(kind.residual_scale) / unit_of_stream(cfg))
        if kind.post_norms:
            changes |= dict.fromkeys(("attn_post_norm", "mlp_post_norm"), lambda x: of_part(of_norm(x)))
        else:
            changes |= dict.fromkeys(("o", "down"), of_part)
        return changes

    return {
        "embed": times(_or_1(embedding_scale(cfg)) / unit_of_stream(cfg)),
        "layers": tuple(layer_of(weights, kind) for weights, kind in zip(params["layers"], cfg.layers, strict=True)),
        "final_norm": of_norm,
        "head": times(None if cfg.logit_divisor is None else 1 / cfg.logit_divisor),
    }


def embedding_scale(cfg: ModelConfig) -> float | None:
    """The number that embeddings are multiplied by, rounded as the model in floats has it; None if there is none."""
    scale = cfg.embed_scale
    if cfg.scale_embeddings:
        scale = _or_1(scale) * float(jnp.asarray(math.sqrt(cfg.d_model), cfg.jax_dtype))
    return scale


def _or_1(factor: float | None) -> float:
    return 1.0 if factor is None else factor
