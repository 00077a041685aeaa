"""Host memory for weights in huge pages, which arrays of a CPU take over.

numpy asks Linux for pages of 2 MB in pieces of memory from 4 MB on. Most matrices are smaller than that. With pages of 4 KB a
processor waits to learn where they lie: steps of 1 to 8 requests take 5 % longer.
"""

import math
import threading
from typing import TypeVar

import jax
import numpy as np

Tree = TypeVar("Tree")

ALIGNMENT = 64  # bytes; jax on a CPU uses arrays that are aligned so without a copy
HUGE_PAGE = 2 << 20  # bytes
PIECE = 64 << 20  # bytes
SMALL = 64 << 10  # bytes


class Arena:
    """Memory for arrays, cut off large pieces. A piece is freed with the last array that lies there.

    Small arrays have memory of their own: the scales of norms would keep all pieces whose matrices have been rounded and freed.
    """

    def __init__(self) -> None:
        """Begins with no memory."""
        self._rest = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array whose numbers are not set yet."""
        size = math.prod(shape) * dtype.itemsize
        if size < SMALL:
            memory = np.empty(size + ALIGNMENT, np.uint8)
            return memory[-memory.ctypes.data % ALIGNMENT :][:size].view(dtype).reshape(shape)
        with self._lock:
            if size > self._rest.size:
                usable = max(size, PIECE)
                piece = np.empty(usable + HUGE_PAGE, np.uint8)
                self._rest = piece[-piece.ctypes.data % HUGE_PAGE :][:usable]
            memory = self._rest[:size]
            self._rest = self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return memory.view(dtype).reshape(shape)


def moved(tree: Tree) -> Tree:
    """`tree` with its arrays in an arena, as far as they lie on one CPU; others stay. Those that were moved are deleted."""
    arena = Arena()
    found: dict[int, jax.Array] = {}  # by the number of the array: it may stand at several places

    def move(leaf: jax.Array) -> jax.Array:
        if id(leaf) in found:
            return found[id(leaf)]
        if {device.platform for device in leaf.devices()} != {"cpu"} or len(leaf.devices()) > 1:
            return leaf
        memory = arena.empty(leaf.shape, leaf.dtype)
        np.copyto(memory, leaf)
        found[id(leaf)] = jax.device_put(memory, leaf.sharding if leaf.committed else None, may_alias=True)
        leaf.delete()
        return found[id(leaf)]

    return jax.tree.map(move, tree)
