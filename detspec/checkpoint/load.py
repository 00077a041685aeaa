"""A model ready for use: config, weights, tokenizer, chat template, and a digest that names exactly these weights.

What reads folders is imported when a folder is read: an engine over weights made in memory needs jax, flax and numpy alone.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from detspec.checkpoint.arena import moved
from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.folder import SHIPPED_MODELS, find_folder, is_shipped, read_eos_ids, read_sampling_defaults
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.mesh import make_mesh, param_shardings, param_specs, place_of, put
from detspec.model.loading import AS_IT_IS, Loading
from detspec.model.params import Params, param_shapes, quantized
from detspec.model.to_integer import integer_params
from detspec.read_json import read_json_object
from detspec.say import say

if TYPE_CHECKING:
    from detspec.checkpoint.chat import ChatTemplate
    from detspec.checkpoint.detokenizer import TokenBytes
    from detspec.checkpoint.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model: config, weights, tokenizer, chat template and digest.

    Attributes:
        cfg: shape and dtype.
        params: the weights.
        tokenizer: None if the folder has none; then prompts are token ids.
        eos_ids: ids that end a text.
        digest: SHA-256 in hex over the config and the bytes of the weights.
        chat_template: None if the folder has none; then conversations cannot be rendered.
        sampling_defaults: how the model's makers would sample: `SamplingParams(**model.sampling_defaults, max_tokens=64)`.
            Nothing uses it unasked; empty is greedy.
        special_tokens: texts of special tokens by the names that the folder gives them, such as "bos_token".
        no_tokenizer: text of errors about a model without a tokenizer.
        source: absolute path of the folder that it was loaded from, or the name of a shipped model; "" if made in memory.
        family: Hugging Face's `model_type` of that folder; "" in our own folders.
        image_ids: ids of tokens that stand for images, where only the text part of a model was read: no prompt may hold them.
        loading: how it was loaded.
        float_cfg: the config of the weights in floats that an integer model was made of, with scales that its `cfg` no longer
            has; None of a model in floats, and if it is not known.
    """

    cfg: ModelConfig
    params: Params
    tokenizer: "Tokenizer | None"
    eos_ids: tuple[int, ...]
    digest: str
    chat_template: "ChatTemplate | None" = None
    sampling_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)
    no_tokenizer: str = "the checkpoint has no tokenizer.json"
    source: str = ""
    family: str = ""
    image_ids: frozenset[int] = frozenset()
    loading: Loading = AS_IT_IS
    float_cfg: ModelConfig | None = None

    @property
    def token_bytes(self) -> "TokenBytes | None":
        """The bytes that tokens add to a text; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.token_bytes

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens left out; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids)

    def text_facts(self) -> dict[str, Any]:
        """All that decides how text becomes tokens and tokens become text, and which tokens end a text."""
        return {
            "tokenizer": None if self.tokenizer is None else self.tokenizer.digest,
            "chat_template": None if self.chat_template is None else self.chat_template.digest,
            "eos_token_ids": list(self.eos_ids),
        }

    def chat_prompt(self, messages: list[dict[str, Any]], /, **variables: Any) -> list[int]:
        """Token ids of a conversation, ready for an answer; `variables` as in `ChatTemplate.render`.

        Contents may be lists of texts, see `ChatTemplate.render_parts`.
        Raises `InputError` if the folder has no chat template or no tokenizer, or the template does not take the conversation.
        """
        if self.tokenizer is None:
            raise InputError(f"{self.no_tokenizer}, so prompts must be token ids, not conversations")
        if self.chat_template is None:
            raise InputError("the checkpoint has no chat template, so prompts must be texts or token ids, not conversations")
        return self.tokenizer.encode(self.chat_template.render_parts(messages, **variables), add_special_tokens=False)


def load(
    path: str | Path | None = None,
    *,
    chips: int = 1,
    sharding: Any = None,
    weights: str | None = None,
    long_texts: bool = False,
    kinds: Sequence[type[Any]] = (),
) -> Model:
    """Loads the folder at `path`, Hugging Face's or our own, or a small model that comes with the package.

    Args:
        path: a folder with a `config.json`, or one that `save_orbax` wrote; or the name of a shipped model, where there is no
            such folder: "tiny_python" (Python source code; the default) or "thinking_parity" (coin flips, Thinking States).
        chips: how many of this process's devices the model is cut over, see `detspec.mesh`. An engine runs where its model
            lies.
        sharding: where the weights go, said in full: a `jax.sharding.Sharding` for all, or a pytree of them like the
            parameters; the first device if None.
        weights: "int8" rounds every matrix by row, each shard where it lies: half of the memory of bfloat16, and products that
            are exact sums of integers (see `detspec.ops.linear.int8`). It is another model, with other bits and another digest.
            "integer" makes a model of integers alone, whose bits follow from arithmetic, see docs/integer.md; "integer8" one
            with activations of 8 bits in the place of 15. Loading needs the memory of the model in its own dtype. None keeps
            that.
        long_texts: rotations as for texts beyond the original length, for all texts: another model, of Phi-3's kind alone.
        kinds: classes of layers of your own that a folder of ours may name, see docs/extending.md.

    Raises:
        InputError: the folder is unsound (see `load_hf`, `load_orbax`, `Tokenizer`), a token that ends a text lies beyond the
            embedding, or the model cannot be cut over so many chips. The tokenizer may have such tokens: Gemma 3's has one.
    """
    from detspec.checkpoint.added_tokens import read_special_tokens
    from detspec.checkpoint.chat import read_chat_template
    from detspec.checkpoint.folder import no_tokenizer
    from detspec.checkpoint.hf import load_hf
    from detspec.checkpoint.orbax_folder import is_orbax, load_orbax
    from detspec.checkpoint.tokenizer import Tokenizer
    from detspec.checkpoint.which_family import image_ids

    loading = Loading(weights, long_texts)
    name = SHIPPED_MODELS[0] if path is None else str(path)
    folder = find_folder(path)
    if chips != 1:
        if sharding is not None:
            raise InputError(f"chips ({chips}) and sharding were given: each says where the weights go, give one of them")
        cfg = load_config(folder, kinds=kinds)
        sharding = param_shardings(cfg, make_mesh(cfg, chips))
    if is_orbax(folder):
        cfg, params, digest = load_orbax(folder, sharding=sharding, kinds=kinds)
    else:
        cfg, params = load_hf(folder, sharding=sharding)
        digest = None
    in_floats = loading.float_config(cfg)
    cfg = loading.config(cfg)
    if cfg.activation_bits is not None:  # made on the host, and put where the others were
        place = place_of(in_floats, params)
        params = put(integer_params(in_floats, params, cfg.activation_bits), place, param_specs(cfg))
    elif cfg.weights is not None:
        params = quantized(params, in_floats, free=True)
    if digest is not None or loading.weights is not None:
        params = moved(params)  # others were read to where they stay
    if digest is None or loading != AS_IT_IS:
        digest = digest_model(cfg, params)
    tokenizer_path = folder / "tokenizer.json"
    tokenizer = Tokenizer(tokenizer_path, num_rows=cfg.vocab_size) if tokenizer_path.exists() else None
    eos_ids = read_eos_ids(folder)
    if any(token >= cfg.vocab_size for token in eos_ids):
        raise InputError(f"{folder}: eos_token_id {list(eos_ids)} lies beyond the embedding's {cfg.vocab_size} rows")
    hf_config = read_json_object(folder / "config.json") or {}
    return Model(
        cfg,
        params,
        tokenizer,
        eos_ids,
        digest,
        chat_template=read_chat_template(folder),
        sampling_defaults=read_sampling_defaults(folder),
        special_tokens=read_special_tokens(folder),
        no_tokenizer=no_tokenizer(folder),
        source=name if is_shipped(name) else os.path.abspath(folder),
        family=str(hf_config.get("model_type", "")),
        image_ids=image_ids(hf_config, tokenizer),
        loading=loading,
        float_cfg=in_floats if cfg.is_integer else None,
    )


def load_config(path: str | Path, *, kinds: Sequence[type[Any]] = ()) -> ModelConfig:
    """The config of the folder at `path`, Hugging Face's or our own, without its weights; `kinds` as for `load`.

    Raises `InputError` if there is no sound config, or a Hugging Face folder's names no dtype.
    """
    from detspec.checkpoint.hf import read_hf_config
    from detspec.checkpoint.orbax_folder import is_orbax, read_orbax_config

    folder = find_folder(path)
    return read_orbax_config(folder, kinds=kinds) if is_orbax(folder) else read_hf_config(folder)


def cast_params(cfg: ModelConfig, params: Params, dtype: str) -> tuple[ModelConfig, Params]:
    """`cfg` and `params` in `dtype`; the very same if it is theirs; `InputError` if a weight is too large for `dtype`."""
    if dtype == cfg.dtype:
        return cfg, params
    cfg = dataclasses.replace(cfg, dtype=dtype)

    def cast(path: tuple[jax.tree_util.KeyEntry, ...], leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        smaller = leaf.astype(like.dtype)
        if not bool(jnp.isfinite(smaller).all()):
            raise InputError(f"weights {jax.tree_util.keystr(path)} hold numbers too large for {dtype}")
        return smaller

    return cfg, jax.tree.map_with_path(cast, params, param_shapes(cfg))


def say_loading(path: str | Path | None, *, what: str = "model") -> None:
    """Writes `what` is being loaded from `path` to the standard error; and of a shipped model that it is a small one.

    None is the shipped model that is loaded if none is named.
    """
    name = SHIPPED_MODELS[0] if path is None else str(path)
    asked = "; --model names another" if path is None else ""
    say(f"loading the {what} {name}{f', a small one that comes with detspec{asked}' if is_shipped(name) else ''}")
