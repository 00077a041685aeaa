"""Filler operations, which do not change the answer: with many of them, non-trivial thoughts are rare."""

import dataclasses

import numpy as np

from detspec.config import is_number
from detspec.errors import InputError


@dataclasses.dataclass(frozen=True)
class Fillers:
    """How many operations of a task's problems are fillers; `InputError` for values out of range."""

    # share of the operations, in [0, 1), that make no step; rounded to whole operations, of which at least one makes a step
    filler: float = 0.0
    up_to: bool = False  # each problem draws its own share, between 0 and `filler`

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not is_number(self.filler) or not 0 <= self.filler < 1:
            raise InputError(f"{name}.filler must be a number in [0, 1), got {self.filler!r}")
        if not isinstance(self.up_to, bool):
            raise InputError(f"{name}.up_to must be True or False, got {self.up_to!r}: the share itself is {name}.filler")


def draw_fillers(rng: np.random.Generator, n: int, share: float, *, up_to: bool = False) -> np.ndarray:
    """Which of `n` operations are fillers: bool `[n]`, `share` of them but never all; `InputError` unless `n` is at least 1.

    With `up_to` the share is first drawn between 0 and `share`. The number of fillers is fixed, not drawn for each operation:
    otherwise short problems would often consist of fillers alone, and their answers would need no thought.
    """
    if not isinstance(n, int | np.integer) or n < 1:
        raise InputError(f"a problem needs a positive number of operations, got {n!r}")
    share = rng.uniform(0, share) if up_to else share
    return rng.permutation(n) < min(round(share * n), n - 1)
