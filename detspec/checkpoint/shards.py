"""Weights read from safetensors files into the shards of their arrays; one device is the case of one shard.

1. A sharding cuts a weight into blocks. This process reads those of its own devices; devices with the same block share it.
2. The numbers of a block lie in the file as runs: one run where the weight is cut along its first axis.
3. Runs are read in pieces, brought to the weight's dtype and checked while the processor's cache holds them.
   Quantized matrices are dequantized in pieces of whole groups.
4. A whole block goes from host memory to its devices, and the next ones are read meanwhile.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from detspec.checkpoint.blocks import Block, block_shape, local_blocks, local_shards, runs, whole_block
from detspec.checkpoint.files import FILE_DTYPES, QUANTIZED_DTYPES, Header
from detspec.checkpoint.quantized import Quantized
from detspec.errors import InputError

READERS = 2  # threads; reading and checking let each other run
PIECE_BYTES = 1 << 20
ALIGNMENT = 64  # bytes; jax on a CPU uses arrays that are aligned so without a copy

Job = TypeVar("Job")
Result = TypeVar("Result")


class Tensor(NamedTuple):
    """A tensor of a file that is a weight, or a part of one."""

    name: str
    header: Header | Quantized
    part: int | None  # index on the first axis of a stacked weight; None if the tensor is the whole weight


class Source(NamedTuple):
    """A weight to be read: what it is made of, and its shape, dtype and sharding."""

    tensors: list[Tensor]
    like: jax.ShapeDtypeStruct


Places = dict[Block, list[Sharding | None]]  # where each block goes; None is the default device


def read_arrays(folder: Path, sources: list[Source]) -> Iterator[tuple[jax.Array, list[str]]]:
    """Each weight in turn on its devices, and the names of its tensors of which this process read NaN or infinity.

    Besides the blocks that devices of a CPU keep, there are at most `READERS + 1` in host memory at a time."""
    places = [_places(source.like) for source in sources]
    jobs = [(source, block) for source, blocks in zip(sources, places, strict=True) for block in blocks]
    with ThreadPoolExecutor(READERS) as pool:
        read = _in_order(pool, lambda job: read_block(folder, *job), jobs)
        for source, blocks in zip(sources, places, strict=True):
            shards: list[jax.Array] = []
            infinite: dict[str, None] = {}  # a tensor that lies in several blocks is named once
            for targets in blocks.values():
                block, names = next(read)
                infinite |= dict.fromkeys(names)
                shards += jax.block_until_ready([jax.device_put(block, target, may_alias=True) for target in targets])
                del block  # else it would stay in memory while the next one is awaited
            yield _assemble(source.like, shards), list(infinite)


def read_block(folder: Path, source: Source, block: Block) -> tuple[np.ndarray, list[str]]:
    """A block of a weight, and the names of its tensors that are not finite in it; too large numbers become infinite."""
    array = aligned_empty(block_shape(block), source.like.dtype)
    infinite = []
    for name, header, part in source.tensors:
        if part is None:
            finite = _fill(folder, header, block, array)
        elif block[0][0] <= part < block[0][1]:
            finite = _fill(folder, header, block[1:], array[part - block[0][0], ...])
        else:
            continue
        if not finite:
            infinite.append(name)
    return array, infinite


def is_stored_as(folder: Path, header: Header, array: jax.Array) -> bool:
    """Whether the tensor has the numbers of `array` in its dtype, as far as this process holds them."""
    for block, shard in local_shards(array).items():
        expected = np.asarray(shard).reshape(-1)
        with (folder / header.file).open("rb", buffering=0) as file:
            for begin, offset, size in runs(header.shape, block, PIECE_BYTES // array.dtype.itemsize):
                piece = np.empty(size, array.dtype)
                _read_run(file, header, begin, piece)
                if not np.array_equal(piece, expected[offset : offset + size]):
                    return False
    return True


def _places(like: jax.ShapeDtypeStruct) -> Places:
    """The blocks of a weight that this process reads, and where each goes."""
    sharding = like.sharding
    if sharding is None:
        return {whole_block(like.shape): [None]}
    return {
        block: [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        for block, devices in local_blocks(like.shape, sharding).items()
    }


def _in_order(pool: ThreadPoolExecutor, fn: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
    """`fn` of each job in the order of `jobs`; unlike with `pool.map`, results that are not yet taken do not pile up."""
    begun: deque[Future[Result]] = deque()
    for job in jobs:
        begun.append(pool.submit(fn, job))
        if len(begun) > READERS:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def _assemble(like: jax.ShapeDtypeStruct, shards: list[jax.Array]) -> jax.Array:
    """The array that is made of these shards of this process; without a sharding, the only one."""
    if like.sharding is None:
        (array,) = shards
        return array
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards, dtype=like.dtype)


def _fill(folder: Path, header: Header | Quantized, block: Block, array: np.ndarray) -> bool:
    """Reads a block of a tensor into `array`, in its dtype; returns whether all of it is finite."""
    if isinstance(header, Quantized):
        return _fill_quantized(folder, header, block, array)
    finite = True
    for piece in _read_runs(folder, header, block, array):
        finite &= all_finite(piece)
    return finite


def _fill_quantized(folder: Path, matrix: Quantized, block: Block, array: np.ndarray) -> bool:
    """Dequantizes a block of a matrix into `array`, in its dtype; returns whether all of it is finite."""
    wide = matrix.widen(block)
    stored = {}
    for suffix, part in matrix.format.parts.items():
        cut = matrix.stored(part, wide)
        array_of_part = _read_stored(folder, matrix.parts[suffix], cut[::-1] if part.turned else cut)
        stored[suffix] = np.ascontiguousarray(array_of_part.T) if part.turned else array_of_part
    finite = True
    (top, bottom), (left, right) = block
    for piece in matrix.pieces(wide):
        (start, stop), (first, _) = piece
        rows = slice(max(start, top), min(stop, bottom))
        numbers = matrix.dequantize(stored, wide, piece)[rows.start - start : rows.stop - start, left - first : right - first]
        target = array[rows.start - top : rows.stop - top]
        with np.errstate(over="ignore"):
            target[:] = numbers.astype(array.dtype)
        finite &= all_finite(target)
    return finite


def _read_stored(folder: Path, header: Header, block: Block) -> np.ndarray:
    """A block of a tensor in the dtype that it is stored in."""
    array = np.empty(block_shape(block), stored_dtype(header))
    for _ in _read_runs(folder, header, block, array):
        pass
    return array


def holds(folder: Path, header: Header, expected: np.ndarray) -> bool:
    """Whether the tensor consists of these whole numbers."""
    is_like = header.shape == expected.shape and header.dtype in ("I32", "I64")
    return is_like and np.array_equal(_read_stored(folder, header, whole_block(header.shape)), expected)


def _read_runs(folder: Path, header: Header, block: Block, array: np.ndarray) -> Iterator[np.ndarray]:
    """Reads a block of a tensor into `array`, in its dtype, and yields each part of it when it is there."""
    numbers = array.reshape(-1)
    with (folder / header.file).open("rb", buffering=0) as file:
        for begin, offset, size in runs(header.shape, block, PIECE_BYTES // array.itemsize):
            piece = numbers[offset : offset + size]
            _read_run(file, header, begin, piece)
            yield piece


def _read_run(file: FileIO, header: Header, begin: int, piece: np.ndarray) -> None:
    """Sets `piece` to the tensor's numbers from `begin` on, in row-major order; those too large become infinite."""
    dtype = stored_dtype(header)
    stored = piece if piece.dtype == dtype else np.empty(piece.shape, dtype)
    read_bytes(file, header.begin + begin * dtype.itemsize, memoryview(stored.view(np.uint8).data))
    if stored is not piece:
        with np.errstate(over="ignore"):
            piece[:] = stored.astype(piece.dtype)


def stored_dtype(header: Header) -> np.dtype:
    """The dtype that a tensor has in its file."""
    return jnp.dtype((FILE_DTYPES | QUANTIZED_DTYPES)[header.dtype])


def read_bytes(file: FileIO, begin: int, target: memoryview) -> None:
    """Fills `target` with the bytes from `begin` on.

    Pages of a memory-mapped file would be faulted in one by one, and then copied.
    """
    file.seek(begin)
    while target:
        count = file.readinto(target)
        if not count:
            raise InputError(f"{file.name} ended while it was read")
        target = target[count:]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose numbers are not set yet, in memory that jax takes over on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def all_finite(array: np.ndarray) -> bool:
    """Whether all numbers in `array` are finite; comparing bit patterns is ten times as fast as `np.isfinite` in bfloat16."""
    infinity = np.asarray(np.inf, array.dtype)
    unsigned = np.dtype(f"uint{8 * infinity.itemsize}")
    magnitudes = np.bitwise_and(array.view(unsigned), np.iinfo(unsigned).max >> 1)
    return bool(magnitudes.max(initial=0) < infinity.view(unsigned))
