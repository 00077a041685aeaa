"""The blocks that a sharding cuts an array into; which of them this process holds, and how one lies in row-major order."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from detspec.errors import InputError

# First and last index + 1 of each axis: ((2, 4), (0, 3)) are the rows 2 and 3 of an array [8, 3].
Block = tuple[tuple[int, int], ...]


class Run(NamedTuple):
    """Numbers that follow each other both in the array and in a block of it, counted in row-major order."""

    begin: int  # place of the first one in the array
    offset: int  # its place in the block
    size: int  # how many


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


def local_blocks(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[Block, list[jax.Device]]:
    """The different blocks of an array that this process holds, in the order of their rows, and the devices of each."""
    blocks: dict[Block, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        blocks.setdefault(block_at(shape, index), []).append(device)
    return dict(sorted(blocks.items()))


def local_shards(array: jax.Array) -> dict[Block, jax.Array]:
    """The different blocks of `array` that this process holds, in the order of their rows, each on one of its devices."""
    shards = {block_at(array.shape, shard.index): shard.data for shard in array.addressable_shards}
    return {block: shards[block] for block in sorted(shards)}


def block_at(shape: tuple[int, ...], index: tuple[slice, ...]) -> Block:
    """The block of an array of this shape that `array[index]` is."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def whole_block(shape: tuple[int, ...]) -> Block:
    """The block that is the whole array."""
    return tuple((0, size) for size in shape)


def block_shape(block: Block) -> tuple[int, ...]:
    """Length of each axis."""
    return tuple(stop - start for start, stop in block)


def slices(block: Block) -> tuple[slice, ...]:
    """What takes the block out of its array: `array[slices(block)]`."""
    return tuple(slice(start, stop) for start, stop in block)


def is_rows(shape: tuple[int, ...], block: Block) -> bool:
    """Whether the block consists of whole rows, and so is one run."""
    return block[1:] == whole_block(shape[1:])


def runs(shape: tuple[int, ...], block: Block, most: int) -> Iterator[Run]:
    """The block of an array of this shape as runs of at most `most` numbers, in order.

    Rows 2 and 3 of an array `[8, 3]` are one run, `Run(6, 0, 6)`. Its columns 1 and 2 are eight, a run for each row:
    `Run(1, 0, 2)`, `Run(4, 2, 2)`, `Run(7, 4, 2)` ...
    """
    # The last axis that is cut, and all after it, lie together.
    last = max((axis for axis, part in enumerate(block) if part != (0, shape[axis])), default=0)
    count = math.prod(block_shape(block[last:]))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    inner = sum(start * stride for (start, _), stride in zip(block[last:], strides[last:], strict=True))
    offset = 0
    for outer in itertools.product(*(range(*part) for part in block[:last])):
        begin = inner + sum(index * stride for index, stride in zip(outer, strides, strict=False))
        for done in range(0, count, most):
            yield Run(begin + done, offset + done, min(most, count - done))
        offset += count
