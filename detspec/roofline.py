"""Least seconds that work takes a device at its peaks, and an exchange takes chips of a target by their links; nothing is run.

Compilers' own estimates are not used: they count the body of a loop once, and of a kernel only what the kernel reports.

jax counts the chips of a TPU slice host by host, 2 x 2 chips each. The first 2, 4 and 8 of v6e:4x4:

    0 1 . .      0 1 . .      0 1 4 5
    . . . .      2 3 . .      2 3 6 7
    1 link       2 links      2 links; a chip in a corner has the fewest, and every chip must receive everything
    1 hop        2 hops       4 hops

An axis is a closed ring, with two links a chip, if it has 16 chips in a slice of two axes, or a multiple of 4 in one of three
(jax-ml.github.io/scaling-book, "All about TPUs"). Where a device is half a chip, two devices share the links of a chip. No
figure was found for the link between them, so it counts as nothing better. GPUs are up to 8 of one host, linked by a switch. A
GPU without such a link counts as alone: what its host's PCIe carries depends on the host.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

from detspec.errors import InputError
from detspec.schedule import Schedule
from detspec.targets import Target

ICI_HOP_S = 1e-6  # scaling-book: about 1 us a hop
# NCCL's own model, src/graph/tuning.cc: a ring with protocol LL starts in 6.6 us, and takes 0.6 us a step on NVLink.
NCCL_START_S = 6.6e-6
NVLINK_STEP_S = 0.6e-6
GPUS_OF_A_HOST = 8


@dataclasses.dataclass(frozen=True)
class Work:
    """The bytes that a program reads from and writes to the device's memory, and its floating-point operations."""

    bytes: float
    flop: float

    def least_s(self, bytes_per_s: float, flop_per_s: float) -> tuple[float, float]:
        """Least seconds of the memory and of the arithmetic, each at its rate."""
        return self.bytes / bytes_per_s, self.flop / flop_per_s

    def seconds(self, target: Target) -> float:
        """Least seconds on `target`, where memory and arithmetic work at the same time, each at its peak."""
        return max(self.least_s(target.bytes_per_s, target.flop_per_s))

    def bound(self, target: Target) -> str:
        """Names the longer of the two on `target`: "memory" or "arithmetic"."""
        memory_s, arithmetic_s = self.least_s(target.bytes_per_s, target.flop_per_s)
        return "memory" if memory_s >= arithmetic_s else "arithmetic"


class PassShape(NamedTuple):
    """The shape of a pass of a model, which decides its work.

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


@dataclasses.dataclass(frozen=True)
class Links:
    """The links by which each device of a group receives values."""

    num: int  # links of a chip in a corner to chips of the group
    bytes_per_s: float  # rate at which a device receives by all links
    cut_bytes_per_s: float  # rate one way of all links across the middle of the group
    hops: int  # links one after the other between the chips farthest apart; steps of a ring on GPUs
    hop_s: float  # seconds of a hop
    start_s: float  # seconds until a collective moves anything

    def seconds(self, received_bytes: float, *, rounds: int = 1, cut_bytes: float = 0.0) -> float:
        """Seconds of a collective in `rounds` across the group.

        Each device receives `received_bytes`, and `cut_bytes` cross the middle of the group one way.
        """
        moving_s = max(received_bytes / self.bytes_per_s, cut_bytes / self.cut_bytes_per_s)
        return self.start_s + rounds * self.hops * self.hop_s + moving_s


def num_devices(target: Target) -> int:
    """Devices of the slice, or linked GPUs of a host."""
    if target.platform == "tpu":
        return len(coordinates(target))
    return GPUS_OF_A_HOST if target.link_bytes_per_s else 1


def links_of(target: Target, chips: int) -> Links:
    """The links between the first `chips` devices of `target`, at least 2.

    Raises `InputError` if there are fewer devices.
    """
    check_devices(target, chips)
    if target.platform == "gpu":
        a_link = target.link_bytes_per_s
        return Links(1, a_link, chips // 2 * a_link, chips - 1, NVLINK_STEP_S, NCCL_START_S)
    whole = slice_shape(target)
    taken = [1 + max(axis) for axis in zip(*coordinates(target)[:chips], strict=True)]
    is_ring = [size == full and _closes(size, len(whole)) for size, full in zip(taken, whole, strict=True)]
    num = max(1, sum((size > 1) + ring for size, ring in zip(taken, is_ring, strict=True)))
    hops = sum(size // 2 if ring else size - 1 for size, ring in zip(taken, is_ring, strict=True))
    longest, closed = max(zip(taken, is_ring, strict=True))
    cut = math.prod(taken) // longest * (2 if closed else 1)
    return Links(
        num=num,
        bytes_per_s=num * target.link_bytes_per_s / _devices_a_chip(target),
        cut_bytes_per_s=cut * target.link_bytes_per_s,
        hops=max(1, hops),
        hop_s=ICI_HOP_S,
        start_s=0.0,
    )


def check_devices(target: Target, chips: int) -> None:
    """Raises `InputError` unless `target` has `chips` devices."""
    if chips > (there_are := num_devices(target)):
        more = "one host has no more" if there_are > 1 else "it has no link to others but the host's, of which nothing is known"
        if target.platform == "tpu":
            more = "name a larger slice of its kind, as v5p:2x2x2 or v6e:2x4"
        counted = "1 device" if there_are == 1 else f"{there_are} devices"
        raise InputError(f"{chips} chips were asked for, but {target.name} has {counted}: {more}")


def coordinates(target: Target) -> list[tuple[int, ...]]:
    """Position of each device of a TPU slice, in jax's order; both halves of a chip have the same."""
    shape = slice_shape(target)
    hosts = [range(size // per) for size, per in zip(shape, (2, 2, 1), strict=False)]
    places = []
    for host in itertools.product(*reversed(hosts)):  # the first axis counts fastest
        for y, x in itertools.product(range(2), range(2)):
            first, second, *rest = reversed(host)
            places += [(2 * first + x, 2 * second + y, *rest)] * _devices_a_chip(target)
    return places


def slice_shape(target: Target) -> tuple[int, ...]:
    """Chips along each axis of a TPU slice."""
    return tuple(int(size) for size in target.name.partition(":")[2].split("x"))


def _devices_a_chip(target: Target) -> int:
    return 2 if "half a chip" in target.device else 1


def _closes(size: int, axes: int) -> bool:
    return size % 4 == 0 if axes == 3 else size == 16
