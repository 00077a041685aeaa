"""Weights read from safetensors files into the shards of their arrays; one device is the case of one shard.

1. A sharding cuts a weight into blocks. This process reads those of its own devices; devices with the same block share it.
2. The numbers of a block lie in the file as runs: one run where the weight is cut along its first axis.
3. Runs are read in pieces, brought to the weight's dtype and checked while the processor's cache holds them.
   Quantized matrices are dequantized in pieces of whole groups.
4. A whole block goes from host memory to its devices, and the next ones are read meanwhile.

Slices of the `safetensors` package do not serve. Memory-mapped ones take twice the memory, because pages that were read stay
mapped; its other way of reading takes a whole tensor for each slice; and neither gives numpy a float8.
"""

import contextlib
import functools
import itertools
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

from detspec.checkpoint.arena import Arena
from detspec.checkpoint.blocks import Block, block_shape, local_blocks, local_shards, runs, whole_block
from detspec.checkpoint.files import FILE_DTYPES, QUANTIZED_DTYPES, Header
from detspec.checkpoint.layout import WHOLE, Cut, Layout
from detspec.checkpoint.quantized import Quantized
from detspec.errors import InputError

READERS = 2  # threads; reading and checking let each other run
PIECE_BYTES = 1 << 20

ALL_DTYPES = FILE_DTYPES | QUANTIZED_DTYPES

FileOf = Callable[[str], FileIO]  # gives the file of a name
Job = TypeVar("Job")
Done = TypeVar("Done")


class Tensor(NamedTuple):
    """A tensor of a file that holds a weight or a part of one; or several, in turns.

    Attributes:
        part: index on the first axis of a stacked weight; None if the tensor holds all of it.
        cuts: where each weight lies in it.
    """

    name: str
    header: Header | Quantized
    part: int | None
    layout: Layout = WHOLE
    cuts: tuple[Cut, ...] = WHOLE.cuts([(0,)])


class Source(NamedTuple):
    """Weights that are read together, which is one in most cases: what they are made of, and shape, dtype and sharding of each.

    Several are alike in the latter.
    """

    tensors: list[Tensor]
    likes: tuple[jax.ShapeDtypeStruct, ...]


def read_arrays(folder: Path, sources: list[Source]) -> Iterator[tuple[list[jax.Array], list[str]]]:
    """Yields the weights of each source on their devices, and the names of tensors of which this process read NaN or infinity.

    Besides the blocks that devices of a CPU keep, there are at most `READERS + 1` in host memory at a time, and what else lies
    in their arenas. Blocks are read on other threads and go to their devices on this one, where the caller's
    `jax.default_device` counts.
    """
    arena = Arena()
    targets_of = [local_blocks(source.likes[0].shape, source.likes[0].sharding) for source in sources]
    jobs = [(source, block, arena) for source, blocks in zip(sources, targets_of, strict=True) for block in blocks]
    with ThreadPoolExecutor(READERS) as pool:
        read = _in_order(pool, lambda job: read_block(folder, *job), jobs)
        for source, blocks in zip(sources, targets_of, strict=True):
            shards: list[list[jax.Array]] = [[] for _ in source.likes]
            infinite: dict[str, None] = {}  # a tensor that lies in several blocks is named once
            for targets in blocks.values():
                arrays, names = next(read)
                infinite |= dict.fromkeys(names)
                for made in shards:
                    array = arrays.pop(0)  # else it would stay in memory while the next one is awaited
                    made += jax.block_until_ready([jax.device_put(array, target, may_alias=True) for target in targets])
                    del array
            yield [_assemble(like, made) for like, made in zip(source.likes, shards, strict=True)], list(infinite)


def _in_order(pool: ThreadPoolExecutor, fn: Callable[[Job], Done], jobs: Iterable[Job]) -> Iterator[Done]:
    """`fn` of each job in the order of `jobs`; unlike with `pool.map`, results that are not yet taken do not pile up."""
    begun: deque[Future[Done]] = deque()
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


def read_block(folder: Path, source: Source, block: Block, arena: Arena) -> tuple[list[np.ndarray], list[str]]:
    """A block of each weight, and the names of the tensors that are not finite in it; too large numbers become infinite."""
    arrays = [arena.empty(block_shape(block), like.dtype) for like in source.likes]
    infinite = []
    with open_files(folder) as file_of:
        for tensor in source.tensors:
            if tensor.part is None:
                finite = _fill(file_of, tensor, block, arrays)
            elif block[0][0] <= tensor.part < block[0][1]:
                finite = _fill(file_of, tensor, block[1:], [array[tensor.part - block[0][0], ...] for array in arrays])
            else:
                continue
            if not finite:
                infinite.append(tensor.name)
    return arrays, infinite


def is_stored_as(folder: Path, header: Header, array: jax.Array) -> bool:
    """Whether the tensor has the numbers of `array` in its dtype, as far as this process holds them."""
    with open_files(folder) as file_of:
        for block, shard in local_shards(array).items():
            rest = np.asarray(shard).reshape(-1)
            for piece in _read_pieces(file_of, header, block, array.dtype):
                if not np.array_equal(piece, rest[: piece.size]):
                    return False
                rest = rest[piece.size :]
    return True


def holds(folder: Path, header: Header, expected: np.ndarray) -> bool:
    """Whether the tensor consists of these whole numbers."""
    if header.shape != expected.shape or header.dtype not in ("I32", "I64"):
        return False
    with open_files(folder) as file_of:
        return np.array_equal(_read_stored(file_of, header, whole_block(header.shape)), expected)


@contextlib.contextmanager
def open_files(folder: Path) -> Iterator[FileOf]:
    """Gives the file of a name in the folder, opened when it is first asked for; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context((folder / name).open("rb", buffering=0)))


def _fill(file_of: FileOf, tensor: Tensor, block: Block, arrays: list[np.ndarray]) -> bool:
    """Reads a block of the weights in a tensor into `arrays`, in their dtype; returns whether all that was read is finite."""
    _, header, _, layout, cuts = tensor
    hull = cuts[0].hull(block)
    finite = True
    if isinstance(header, Header) and not layout.turned and layout.turn is None:
        (array,) = arrays
        for piece in _read_pieces(file_of, header, ((0, 1),) * layout.ones + hull, array.dtype, array):
            finite &= all_finite(piece)
        return finite
    if isinstance(header, Header):
        tiles = _read_tiles(file_of, header, layout, hull, cuts[0])
    else:
        tiles = header.tiles(hull, cuts[0].period, functools.partial(_read_stored, file_of))
    for tile, stored in tiles:
        with np.errstate(over="ignore"):
            numbers = stored.astype(arrays[0].dtype, copy=False)
        finite &= all_finite(numbers)
        at = [slice(start - first, stop - first) for (start, stop), (first, _) in zip(tile, block, strict=True)]
        for cut, array in zip(cuts, arrays, strict=True):
            at[cut.axis], taken = cut.taken(numbers, tile[cut.axis][0], block[cut.axis])
            array[tuple(at)] = taken
    return finite


def _read_tiles(file_of: FileOf, header: Header, layout: Layout, hull: Block, cut: Cut) -> Iterator[tuple[Block, np.ndarray]]:
    """Yields a block of a tensor as stored, in tiles of whole rows of the file: which part of the tensor, and its numbers.

    The axes of both are in the order of the weights. Tiles consist of whole periods.
    """
    in_file = layout.in_file(hull)
    row = max(0, len(in_file) - 2)
    unit = cut.period if cut.axis == row and not layout.turned else 1
    row_bytes = math.prod(block_shape(in_file[row + 1 :])) * stored_dtype(header).itemsize
    step = max(1, PIECE_BYTES // row_bytes // unit) * unit
    for outer in itertools.product(*(range(*part) for part in in_file[:row])):
        for start in range(*in_file[row], step):
            rows = (start, min(start + step, in_file[row][1]))
            tile = (*((index, index + 1) for index in outer), rows, *in_file[row + 1 :])
            numbers = _read_stored(file_of, header, ((0, 1),) * layout.ones + tile).reshape(block_shape(tile))
            yield layout.in_file(tile), numbers.swapaxes(-1, -2) if layout.turned else numbers


def _read_stored(file_of: FileOf, header: Header, block: Block) -> np.ndarray:
    """A block of a tensor in the dtype that it is stored in."""
    array = np.empty(block_shape(block), stored_dtype(header))
    for _ in _read_pieces(file_of, header, block, array.dtype, array):
        pass
    return array


def _read_pieces(
    file_of: FileOf, header: Header, block: Block, dtype: np.dtype, into: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yields a block of a tensor in pieces `[n]` of `dtype`, in row-major order; numbers too large become infinite.

    If there is an array to read `into`, the pieces are parts of it; else they are in memory of their own.
    """
    stored = stored_dtype(header)
    rest = None if into is None else into.reshape(-1)
    for begin, size in runs(header.shape, block, PIECE_BYTES // dtype.itemsize):
        piece = np.empty(size, dtype) if rest is None else rest[:size]
        read = piece if dtype == stored else np.empty(size, stored)
        read_bytes(file_of(header.file), header.begin + begin * stored.itemsize, memoryview(read.view(np.uint8).data))
        if read is not piece:
            with np.errstate(over="ignore"):
                piece[:] = read.astype(dtype)
        yield piece
        rest = None if rest is None else rest[size:]


def stored_dtype(header: Header) -> np.dtype:
    """The dtype that a tensor has in its file."""
    return jnp.dtype(ALL_DTYPES[header.dtype])


def read_bytes(file: FileIO, begin: int, target: memoryview) -> None:
    """Fills `target` with the bytes from `begin` on."""
    file.seek(begin)
    while target:
        count = file.readinto(target)
        if not count:
            raise InputError(f"{file.name} ended while it was read")
        target = target[count:]


def all_finite(array: np.ndarray) -> bool:
    """Whether all numbers in `array` are finite; comparing bit patterns is ten times as fast as `np.isfinite` in bfloat16."""
    unsigned, magnitude, infinity = _bit_patterns(array.dtype)
    return bool(np.bitwise_and(array.view(unsigned), magnitude).max(initial=0) < infinity)


@functools.cache
def _bit_patterns(dtype: np.dtype) -> tuple[np.dtype, int, int]:
    """The unsigned dtype of that size, the mask of all bits but the sign's, and infinity in it."""
    infinity = np.asarray(np.inf, dtype)
    unsigned = np.dtype(f"uint{8 * infinity.itemsize}")
    return unsigned, int(np.iinfo(unsigned).max >> 1), int(infinity.view(unsigned))
