"""The blocks that a sharding cuts an array into; which of them this process holds, and how one lies in row-major order."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from detspec.errors import InputError

# First and last index + 1 of each axis: ((2, 4), (0, 3)) are the rows 2 and 3 of an array [8, 3].
Block = tuple[tuple[int, int], ...]


def check_cuts(shapes: Any) -> None:
    """Raises `InputError` naming the weights whose sharding does not cut them into equal blocks; `shapes` is a pytree."""
    wrong = []
    for path, leaf in jax.tree.leaves_with_path(shapes):
        try:
            if leaf.sharding is not None:
                leaf.sharding.shard_shape(leaf.shape)
        except ValueError as error:
            wrong.append(f"{jax.tree_util.keystr(path)} {list(leaf.shape)}: {error}")
    if wrong:
        raise InputError(
            f"{len(wrong)} weights cannot be cut into equal blocks as `sharding` asks; give a mesh whose axes divide theirs, "
            f"or PartitionSpec() for weights that shall stay whole. The first one is {wrong[0]}"
        )


def local_blocks(shape: tuple[int, ...], sharding: Sharding | None) -> dict[Block, list[Sharding | None]]:
    """The different blocks of an array that this process holds, in the order of their rows, and where each goes.

    Without a sharding that is the whole array, and None, the default device.
    """
    if sharding is None:
        return {whole_block(shape): [None]}
    blocks: dict[Block, list[Sharding | None]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        blocks.setdefault(block_at(shape, index), []).append(target)
    return dict(sorted(blocks.items()))


def local_shards(array: jax.Array) -> dict[Block, jax.Array]:
    """The different blocks of `array` that this process holds, in the order of their rows, each on one of its devices."""
    shards = {block_at(array.shape, shard.index): shard.data for shard in array.addressable_shards}
    return dict(sorted(shards.items(), key=lambda item: item[0]))


def block_at(shape: tuple[int, ...], index: tuple[slice, ...]) -> Block:
    """The block of an array of this shape that `array[index]` is."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def whole_block(shape: tuple[int, ...]) -> Block:
    """The block that is the whole array."""
    return tuple((0, size) for size in shape)


def block_shape(block: Block) -> tuple[int, ...]:
    """Length of each axis."""
    return tuple(stop - start for start, stop in block)


def runs(shape: tuple[int, ...], block: Block, most: int) -> Iterator[tuple[int, int]]:
    """Begin and length of each run of at most `most` numbers that the block of an array consists of, in row-major order.

    Rows 2 and 3 of an array `[8, 3]` are one run, `(6, 6)`. Its columns 1 and 2 are eight, a run for each row: `(1, 2)`,
    `(4, 2)`, `(7, 2)` ...
    """
    # The last axis that is cut, and all after it, lie together.
    last = max((axis for axis, part in enumerate(block) if part != (0, shape[axis])), default=0)
    size = math.prod(block_shape(block[last:]))
    for outer in itertools.product(*(range(*part) for part in block[:last])):
        first = (*outer, *(start for start, _ in block[last:]))
        begin = functools.reduce(lambda place, axis: place * axis[1] + axis[0], zip(first, shape, strict=True), 0)
        for done in range(0, size, most):
            yield begin + done, min(most, size - done)
