"""A model ready for use: config, weights, tokenizer, and a digest that names exactly these weights."""

import dataclasses
import hashlib
import importlib.resources
import json
from pathlib import Path

import numpy as np

from detspec.checkpoint.hf import load_hf, named_tensors
from detspec.checkpoint.tokenizer import Tokenizer, read_eos_ids
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.params import Params

SHIPPED_MODEL = "tiny_python"


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What a folder holds.

    Attributes:
        cfg: shape and dtype.
        params: the weights.
        tokenizer: None if the folder has none; then prompts are token ids.
        eos_ids: ids that end a text.
        digest: SHA-256 in hex over the config and the bytes of the weights.
    """

    cfg: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    digest: str


def load(path: str | Path | None = None) -> Model:
    """Loads the Hugging Face folder at `path`, or the small model that comes with the package.

    Raises `InputError` if the folder is unsound (see `load_hf`) or its tokenizer has ids beyond the embedding.
    """
    folder = shipped_folder() if path is None else Path(path)
    cfg, params = load_hf(folder)
    tokenizer_path = folder / "tokenizer.json"
    tokenizer = Tokenizer(tokenizer_path) if tokenizer_path.exists() else None
    if tokenizer is not None and tokenizer.vocab_size > cfg.vocab_size:
        raise InputError(f"{tokenizer_path} has ids up to {tokenizer.vocab_size - 1}, the embedding only {cfg.vocab_size} rows")
    eos_ids = read_eos_ids(folder)
    if any(token >= cfg.vocab_size for token in eos_ids):
        raise InputError(f"{folder}: eos_token_id {list(eos_ids)} lies beyond the embedding's {cfg.vocab_size} rows")
    return Model(cfg, params, tokenizer, eos_ids, digest_model(cfg, params))


def shipped_folder() -> Path:
    """Where the small model lies in the installed package."""
    return Path(str(importlib.resources.files("detspec") / "assets" / SHIPPED_MODEL))


def digest_model(cfg: ModelConfig, params: Params) -> str:
    """SHA-256 in hex over the config as sorted JSON, then name, shape, dtype and bytes of each tensor in file order."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(cfg), sort_keys=True).encode())
    for name, tensor in named_tensors(cfg, params).items():
        digest.update(f"\n{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(np.ascontiguousarray(tensor).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()
