"""The digest that names a model: its config and every bit of its weights, on however many devices and processes they lie."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from detspec.checkpoint.blocks import Block, block_at, block_shape, local_shards, whole_block
from detspec.config import ModelConfig
from detspec.model.dense import config_to_json
from detspec.model.params import Params

HASHERS = 4  # threads at most; each holds one shard of a GPU or TPU in host memory


def digest_model(cfg: ModelConfig, params: Params, *, stored: Mapping[str, Any] | None = None) -> str:
    """SHA-256 in hex over the config as sorted JSON, then each leaf's path, shape, dtype and SHA-256 of its bytes.

    `stored` is the config's JSON as a folder holds it, which an earlier version may have written; today's if None.

    The bytes are those of the whole array in row-major order, so a mesh changes nothing. Where arrays are cut along their first
    axis, they are hashed shard by shard. If devices of several processes hold them, every process must call this.
    """
    leaves = jax.tree.leaves_with_path(params)
    arrays = [leaf for _, leaf in leaves]
    is_local = all(not isinstance(array, jax.Array) or array.is_fully_addressable for array in arrays)
    hashes = _hash_here(arrays) if is_local else _hash_together(arrays)
    described: list[Any] = [config_to_json(cfg) if stored is None else stored]
    for (path, leaf), digest in zip(leaves, hashes, strict=True):
        described.append([jax.tree_util.keystr(path), list(leaf.shape), str(leaf.dtype), digest.hex()])
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _hash_here(arrays: list[Any]) -> list[bytes]:
    """SHA-256 of each array; this process holds all of them."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, HASHERS)) as pool:  # hashing lets other threads run
        return list(pool.map(lambda array: _hash_parts(array, _parts(array)), arrays))


def _hash_together(arrays: list[Any]) -> list[bytes]:
    """SHA-256 of each array, of which each process holds some shards.

    A hash needs its bytes in order. So a process that holds a shard sends it to all, shard after shard. Array i is hashed by
    process i modulo the number of processes, and at the end they exchange the hashes.
    """
    from jax.experimental import multihost_utils  # only with several processes

    hashes = np.zeros((len(arrays), hashlib.sha256().digest_size), np.uint8)
    for i, array in enumerate(arrays):
        if i % jax.process_count() == jax.process_index():
            hashes[i] = np.frombuffer(_hash_parts(array, _sent_parts(array)), np.uint8)
        else:
            for _ in _sent_parts(array):
                pass
    # The others' rows are zeros, so the sum is the one hash.
    return [row.tobytes() for row in multihost_utils.process_allgather(hashes).sum(axis=0, dtype=np.uint8)]


def _hash_parts(array: Any, parts: Iterable[tuple[Block, np.ndarray]]) -> bytes:
    """SHA-256 of the bytes in row-major order of an array that comes in these parts, sorted by their rows."""
    sha = hashlib.sha256()
    whole = None
    for block, part in parts:
        if block[1:] == whole_block(array.shape[1:]):  # whole rows
            sha.update(_bytes(part))
        else:  # rows lie on several devices
            whole = np.empty(array.shape, array.dtype) if whole is None else whole
            whole[tuple(slice(*axis) for axis in block)] = part
    if whole is not None:
        sha.update(_bytes(whole))
    return sha.digest()


def _bytes(array: np.ndarray) -> memoryview:
    """The bytes in row-major order."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def _parts(array: Any) -> Iterator[tuple[Block, np.ndarray]]:
    """The blocks of an array of which this process holds all, in the order of their rows, one at a time on the host."""
    if isinstance(array, jax.Array):
        yield from ((block, np.asarray(shard)) for block, shard in local_shards(array).items())
    else:
        yield whole_block(array.shape), array


def _sent_parts(array: Any) -> Iterator[tuple[Block, np.ndarray]]:
    """The blocks of an array in the order of their rows, each sent from one process to all; all of them must ask for them."""
    from jax.experimental import multihost_utils  # only with several processes

    if not isinstance(array, jax.Array) or array.is_fully_replicated:
        yield from _parts(array)
        return
    owners: dict[Block, int] = {}
    indices: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
    for device, index in indices.items():
        block = block_at(array.shape, index)
        owners[block] = min(device.process_index, owners.get(block, device.process_index))
    here = local_shards(array)
    for block, owner in sorted(owners.items()):
        is_source = owner == jax.process_index()
        part = np.asarray(here[block]) if is_source else np.zeros(block_shape(block), array.dtype)
        # As integers: in a sum of floats with zeros, -0 would become 0.
        sent = multihost_utils.broadcast_one_to_all(np.ascontiguousarray(part).view(np.uint8), is_source)
        yield block, sent.view(array.dtype)
