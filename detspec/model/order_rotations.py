"""Heads of queries and keys put into the order that integer models rotate, by changing weights alone.

A pair of places that is rotated is half a head apart there. Scores are sums over places, so any order gives the same ones, if
queries and keys have it alike. With 6 places, of which the first 4 are rotated as neighbours: `[a, a', b, b', c, d]` becomes
`[a, b, c, a', b', d]`, where the pair `c, d` turns by 0.

A factor of sines and cosines (YaRN, "longrope") is one of the places that are rotated, so it goes into their weights as well.
"""

from typing import Any

import numpy as np

from detspec.model.fold_scales import WeightChange


def order_of(size: int, rotated: int, *, interleaved: bool) -> np.ndarray:
    """The places of a head `[size]` in their new order, of which the first `rotated` are rotated."""
    pairs = np.arange(rotated).reshape(-1, 2) if interleaved else np.arange(rotated).reshape(2, -1).T
    rest = np.arange(rotated, size).reshape(2, -1).T
    return np.concatenate([pairs, rest]).T.reshape(-1)


def ordering(mixer: Any, weights: dict[str, Any]) -> dict[str, WeightChange]:
    """The changes of a layer's `weights` by their names: matrices, biases and norms of queries and keys."""
    if mixer.positions != "rope":
        return {}
    order = order_of(mixer.head_dim, mixer.rotated, interleaved=mixer.rope.interleaved)
    factor = np.ones(mixer.head_dim)
    factor[: mixer.rotated] = 1 if mixer.rope.scaling is None else mixer.rope.scaling.attention_factor

    def change(is_last: bool) -> WeightChange:
        """The change of the last weight before the rotation has the factor, too."""
        by = (factor if is_last else np.ones_like(factor))[order]

        def ordered(x: np.ndarray) -> np.ndarray:
            heads = x.reshape(-1, mixer.head_dim, *x.shape[1:])[:, order]
            return (heads * by.reshape(-1, *[1] * (x.ndim - 1))).reshape(x.shape)

        return ordered

    found: dict[str, WeightChange] = {}
    for name in "qk":
        is_normed = f"{name}_norm" in weights
        found |= {name: change(not is_normed), f"{name}_bias": change(not is_normed), f"{name}_norm": change(True)}
    return {name: own for name, own in found.items() if name in weights}
