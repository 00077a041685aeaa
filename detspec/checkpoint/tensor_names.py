"""The tensors of Hugging Face checkpoints: their names, and the leaf of the parameters that each is."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from detspec.errors import InputError
from detspec.model.params import Params

# Name of a tensor -> path in the pytree. The `{}` of a path is the index of the layer. A name with one `{}` more than its path
# names the parts of a stacked weight along its first axis; here down is `[E, D, F]`, made of E tensors `[D, F]`:
#
#     "model.layers.{}.mlp.experts.{}.down_proj.weight": ("layers", "{}", "experts", "down")
TensorNames = dict[str, tuple[str, ...]]

EMBEDDING: TensorNames = {"model.embed_tokens.weight": ("embed",)}
LAYER_NAMES: TensorNames = {
    "model.layers.{}.input_layernorm.weight": ("layers", "{}", "attn_norm"),
    "model.layers.{}.self_attn.q_proj.weight": ("layers", "{}", "q"),
    "model.layers.{}.self_attn.q_proj.bias": ("layers", "{}", "q_bias"),
    "model.layers.{}.self_attn.k_proj.weight": ("layers", "{}", "k"),
    "model.layers.{}.self_attn.k_proj.bias": ("layers", "{}", "k_bias"),
    "model.layers.{}.self_attn.v_proj.weight": ("layers", "{}", "v"),
    "model.layers.{}.self_attn.v_proj.bias": ("layers", "{}", "v_bias"),
    "model.layers.{}.self_attn.o_proj.weight": ("layers", "{}", "o"),
    "model.layers.{}.self_attn.o_proj.bias": ("layers", "{}", "o_bias"),
    "model.layers.{}.self_attn.q_norm.weight": ("layers", "{}", "q_norm"),
    "model.layers.{}.self_attn.k_norm.weight": ("layers", "{}", "k_norm"),
    "model.layers.{}.mlp.gate_proj.weight": ("layers", "{}", "gate"),
    "model.layers.{}.mlp.up_proj.weight": ("layers", "{}", "up"),
    "model.layers.{}.mlp.down_proj.weight": ("layers", "{}", "down"),
}
OUTPUT: TensorNames = {"model.norm.weight": ("final_norm",), "lm_head.weight": ("head",)}
# Llama has two norms in a layer, each before what it feeds. Gemma has four; one name means another norm there.
LLAMA_NAMES: TensorNames = {
    **EMBEDDING,
    **LAYER_NAMES,
    "model.layers.{}.post_attention_layernorm.weight": ("layers", "{}", "mlp_norm"),
    **OUTPUT,
}
GEMMA_NAMES: TensorNames = {
    **EMBEDDING,
    **LAYER_NAMES,
    "model.layers.{}.post_attention_layernorm.weight": ("layers", "{}", "attn_post_norm"),
    "model.layers.{}.pre_feedforward_layernorm.weight": ("layers", "{}", "mlp_norm"),
    "model.layers.{}.post_feedforward_layernorm.weight": ("layers", "{}", "mlp_post_norm"),
    **OUTPUT,
}
# Buffers that the config decides: rotary frequencies and tables, of a layer or of the model (Gemma 3 has some for each kind of
# layers), and Gemma's scale of embeddings. Some programs store them, and they are not read.
CONSTANT = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb(_local)?\.(\w+_)?(inv_freq|cos_cached|sin_cached)|model\.embed_tokens\.embed_scale"
)


class TensorPath(NamedTuple):
    """The leaf of the parameters that a tensor of a checkpoint is, or is a part of."""

    path: tuple[str | int, ...]  # keys and indices from the root of the pytree
    part: int | None  # index on the first axis of a stacked weight; None if the tensor is the whole weight


def tensor_paths(names: TensorNames, params: Params) -> dict[str, TensorPath]:
    """Tensor name -> its path in `params`, layers in ascending order; `params` may hold shapes instead of arrays.

    Raises `InputError` if `names` lacks a weight of `params`.
    """
    paths: dict[str, TensorPath] = {}
    for layered, group in itertools.groupby(names.items(), key=lambda item: "{}" in item[1]):
        templates = list(group)
        for index in range(len(params["layers"])) if layered else (0,):
            for name, template in templates:
                path = tuple(index if key == "{}" else key for key in template)
                leaf = leaf_at(params, path)
                if leaf is None:
                    continue
                numbers = (index,) * layered
                if name.count("{}") == len(numbers):
                    paths[name.format(*numbers)] = TensorPath(path, None)
                else:
                    paths |= {name.format(*numbers, part): TensorPath(path, part) for part in range(leaf.shape[0])}
    named = {".".join(map(str, found.path)) for found in paths.values()}
    for path, _ in jax.tree.leaves_with_path(params):
        weight = jax.tree_util.keystr(path, simple=True, separator=".")
        if weight not in named:
            raise InputError(f"no tensor name for the weight {weight}: the table of names has {', '.join(names)}")
    return paths


def leaf_at(tree: Any, path: Sequence[str | int]) -> Any:
    """`tree[path[0]][path[1]]...`, or None if there is no such entry."""
    for key in path:
        if isinstance(tree, dict) and key not in tree:
            return None
        tree = tree[key]
    return tree
