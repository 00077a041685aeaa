"""The digest that names a model: its config and every bit of its weights."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from detspec.config import ModelConfig
from detspec.model.params import Params


def digest_model(cfg: ModelConfig, params: Params) -> str:
    """SHA-256 in hex over the config as sorted JSON, then each leaf's path, shape, dtype and SHA-256 of its bytes."""
    leaves = jax.tree.leaves_with_path(params)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing lets other threads run
        hashes = list(pool.map(_digest_array, (leaf for _, leaf in leaves)))
    described: list[Any] = [cfg.to_json()]
    for (path, leaf), digest in zip(leaves, hashes, strict=True):
        described.append([jax.tree_util.keystr(path), list(leaf.shape), str(leaf.dtype), digest])
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _digest_array(array: jax.Array) -> str:
    """SHA-256 in hex of the bytes in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data).hexdigest()
