"""Bytes and operations, and how long they take a device at its peaks; nothing is run or compiled.

Compilers' own estimates are not used: they count the body of a loop once, and of a kernel only what the kernel reports.
"""

import dataclasses
import math
from typing import NamedTuple

from detspec.schedule import Schedule
from detspec.targets import Target


@dataclasses.dataclass(frozen=True)
class Work:
    """The bytes that a program reads from and writes to the device's memory, and its floating-point operations."""

    bytes: float
    flop: float

    def seconds(self, target: Target) -> float:
        """Least seconds on `target`, where memory and arithmetic work at the same time, each at its peak."""
        return max(self.bytes / target.bytes_per_s, self.flop / target.flop_per_s)

    def bound(self, target: Target) -> str:
        """Says what takes longer on `target`: "memory" or "arithmetic"."""
        return "memory" if self.bytes / target.bytes_per_s >= self.flop / target.flop_per_s else "arithmetic"


class PassShape(NamedTuple):
    """What decides the work of one pass of a model.

    Attributes:
        schedule: the schedule of this pass: its rows, window, query tile, page and cache dtype count.
        windows: windows that are not padding, at most `schedule.budget.groups`.
        context: positions that each token attends to, its own included.
        chips: chips that share the model, see `detspec.mesh`.
    """

    schedule: Schedule
    windows: int
    context: int
    chips: int = 1

    def own_share(self, num_heads: int) -> int:
        """How many of `num_heads` heads a chip has, where those that chips cannot part are copied."""
        return num_heads // math.gcd(num_heads, self.chips)
