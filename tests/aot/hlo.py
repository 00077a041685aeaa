"""Finds kernels and moved page pools in optimised HLO."""

import math
import re

import jax

KERNEL_CALLS = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}  # prefixes of the targets of Pallas's custom calls
MOVES = "copy|copy-start|transpose|convert|bitcast-convert"
INSTRUCTION = re.compile(rf"= \(?\w+\[([\d,]+)\]\S* ({MOVES})\(")


def kernel_calls(hlo: str, platform: str) -> int:
    """Number of calls of Pallas kernels in `hlo`."""
    return len(re.findall(rf'custom_call_target="{KERNEL_CALLS[platform]}', hlo))


def pool_moves(hlo: str, pools: tuple[jax.ShapeDtypeStruct, ...]) -> list[str]:
    """Instructions, also inside fusions, that move or convert as many elements as one of `pools` has.

    Layout and dtype may differ, so the number of elements decides: choose a number of pages that makes it unique.
    """
    sizes = {math.prod(pool.shape) for pool in pools}
    lines = (line.strip() for line in hlo.splitlines())
    found = ((line, INSTRUCTION.search(line)) for line in lines)
    return [line for line, match in found if match and math.prod(map(int, match[1].split(","))) in sizes]


def calls_over_pool(hlo: str, platform: str, pool: jax.ShapeDtypeStruct) -> int:
    """Number of calls of Pallas kernels whose operands include two arrays of the shape of `pool`: keys and values."""
    shape = f"[{','.join(map(str, pool.shape))}]"
    calls = [line for line in hlo.splitlines() if f'custom_call_target="{KERNEL_CALLS[platform]}' in line]
    return sum(line.partition("operand_layout_constraints=")[2].partition("metadata")[0].count(shape) == 2 for line in calls)
