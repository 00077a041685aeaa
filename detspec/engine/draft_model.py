"""A smaller model as the draft source of an engine."""

import numpy as np

from detspec.cache import shares_pages
from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.draft.source import Drafter
from detspec.errors import InputError
from detspec.generation.draft_model import draft_model_source
from detspec.model.params import active_params
from detspec.schedule import Numerics


def draft_model(model: Model, *, target: Model) -> Drafter:
    """A draft source that decodes with `model`, for engines of `target`.

        small = ds.load("Qwen3-0.6B")
        engine = ds.Engine(target, drafters={"draft_model": ds.draft_model(small, target=target)})

    Both need the same tokenizer: ids that mean other tokens are guesses that fail. Memory is that of its weights, and of keys
    and values in as many pages as the engine has.

    Raises `InputError` if the vocabularies have other sizes, or the draft model thinks or keeps states by
    sequence.
    """
    if model.cfg.vocab_size != target.cfg.vocab_size:
        raise InputError(
            f"the draft model has {model.cfg.vocab_size} tokens, the model {target.cfg.vocab_size}: a draft model needs the "
            "same vocabulary"
        )
    if not shares_pages(model.cfg, Numerics()):
        raise InputError("a model with layers that keep states by sequence cannot be a draft model: it could not go back to them")
    if model.cfg.thinking is not None:
        raise InputError("a model that thinks cannot be a draft model: it would have to think about prompts of its own")
    return Drafter(draft_model_source(model.cfg, _bytes_read(model.cfg) / _bytes_read(target.cfg)), model.params)


def _bytes_read(cfg: ModelConfig) -> int:
    """Bytes of weights that a token is multiplied with."""
    return active_params(cfg) * (1 if cfg.weights == "int8" else np.dtype(cfg.jax_dtype).itemsize)
