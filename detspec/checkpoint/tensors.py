"""The tensors that the weights of a model are stored as: from a table of names, by name."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from detspec.checkpoint.families.family import TensorNames
from detspec.checkpoint.layout import Layout, Shape
from detspec.errors import InputError
from detspec.model.params import Params

WeightPath = tuple[str | int, ...]  # keys and indices from the root of the pytree


class Stored(NamedTuple):
    """A tensor of a checkpoint: the weights that it holds, and how.

    Attributes:
        layout: how they lie in it.
        paths: where they are in the parameters.
        part: index on the first axis of stacked weights; None if the tensor holds all of each.
        shapes: of the weights, or of those parts.
    """

    layout: Layout
    paths: tuple[WeightPath, ...]
    part: int | None
    shapes: tuple[Shape, ...]

    @property
    def shape(self) -> Shape:
        """The shape of the tensor in the file."""
        return self.layout.shape(self.shapes)

    @property
    def shape_of_rows(self) -> Shape:
        """That shape with outputs before inputs, as quantized matrices have it."""
        return dataclasses.replace(self.layout, turned=False).shape(self.shapes)


def stored_tensors(names: TensorNames, params: Params) -> dict[str, Stored]:
    """Tensor name -> what it holds, layers in ascending order; `params` may hold shapes instead of arrays.

    Raises `InputError` if `names` lacks a weight of `params`.
    """
    tensors: dict[str, Stored] = {}
    layouts = [(name, held if isinstance(held, Layout) else Layout((held,))) for name, held in names.items()]
    for layered, group in itertools.groupby(layouts, key=lambda item: "{}" in item[1].paths[0]):
        templates = list(group)
        for index in range(len(params["layers"])) if layered else (0,):
            for name, layout in templates:
                paths = tuple(tuple(index if key == "{}" else key for key in path) for path in layout.paths)
                leaves = [leaf_at(params, path) for path in paths]
                if any(leaf is None for leaf in leaves):
                    continue
                shapes = tuple(leaf.shape for leaf in leaves)
                numbers = (index,) * layered
                if name.count("{}") == len(numbers):
                    tensors[name.format(*numbers)] = Stored(layout, paths, None, shapes)
                else:
                    of_part = tuple(shape[1:] for shape in shapes)
                    for part in range(shapes[0][0]):
                        tensors[name.format(*numbers, part)] = Stored(layout, paths, part, of_part)
    named = {".".join(map(str, path)) for stored in tensors.values() for path in stored.paths}
    for keys, _ in jax.tree.leaves_with_path(params):
        weight = jax.tree_util.keystr(keys, simple=True, separator=".")
        if weight not in named:
            raise InputError(f"no tensor name for the weight {weight}: the table of names has {', '.join(names)}")
    return tensors


def leaf_at(tree: Any, path: Sequence[str | int]) -> Any:
    """`tree[path[0]][path[1]]...`, or None if there is no such entry."""
    for key in path:
        if isinstance(tree, dict) and key not in tree:
            return None
        tree = tree[key]
    return tree


def named_tensors(names: TensorNames, params: Params) -> dict[str, jax.Array | np.ndarray]:
    """Every array of `params` under its Hugging Face name, in the order of the name table; stacked weights are split."""
    tensors = {}
    for name, stored in stored_tensors(names, params).items():
        leaves = [leaf_at(params, path) for path in stored.paths]
        held = leaves if stored.part is None else [np.asarray(leaf)[stored.part] for leaf in leaves]
        tensors[name] = held[0] if stored.layout.is_plain else stored.layout.fused(held)
    return tensors


def tied_head(names: TensorNames, shapes: Params) -> str | None:
    """The name of the head if it is the embedding; some checkpoints store it twice."""
    return None if "head" in shapes else next((name for name, path in names.items() if path == ("head",)), None)
