"""How XLA's products in an optimised program for a GPU are summed: by kernels whose tiles the program names, or by cuBLAS."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from fixed_order import APART, PRODUCTS
from instructions import Instruction, instructions

CUBLAS = "__cublas"  # how targets of custom calls of the library begin
TILES = re.compile(r'"num_warps":"(\d+)","output_tiles":\[\{"sizes":\[(.*?)\]\}\],.*?"num_stages":(\d+)')
BLOCK = re.compile(r'"sizes":\["(\d+)"\]')
WITH_WEIGHTS = "i,oi->"  # in the names of products with weights, which have no other axes than rows, inputs and outputs


class Held(NamedTuple):
    """How a product is summed, whatever its number of rows."""

    is_cut: bool  # its inputs into parts, which something else adds; known of products with weights
    block: int  # inputs that one step of the sum takes
    tile: tuple[str, ...]  # rows and outputs of a thread block
    num_warps: int
    num_buffers: int


def held_products(hlo: str, *, apart: Iterable[str] = APART) -> list[Held]:
    """The products of floats in `hlo`, outside the scopes `apart`, in its order; those of cuBLAS are left out."""
    scopes = set(apart)
    every = list(instructions(hlo))
    dots = {each.computation: each for each in every if each.opcode in PRODUCTS and each.is_float}
    return [
        _held(dot, each)
        for each in every
        if scopes.isdisjoint(each.op_name.split("/")) and each.opcode == "fusion" and (dot := _dot_of(each, dots)) is not None
    ]


def library_products(hlo: str, *, apart: Iterable[str] = APART) -> list[Instruction]:
    """The products of cuBLAS in `hlo`, outside the scopes `apart`."""
    scopes = set(apart)
    return [
        each
        for each in instructions(hlo)
        if each.opcode == "custom-call"
        and each.attribute('custom_call_target="').startswith(CUBLAS)
        and scopes.isdisjoint(each.op_name.split("/"))
    ]


def _dot_of(fusion: Instruction, dots: dict[str, Instruction]) -> Instruction | None:
    return next((dots[name] for name in fusion.called if name in dots), None)


def _held(dot: Instruction, fusion: Instruction) -> Held:
    warps, tile, buffers = TILES.search(fusion.attributes).groups()
    return Held(
        is_cut=WITH_WEIGHTS in dot.op_name and "batch_dims" in dot.attributes,
        block=int(BLOCK.search(dot.attributes)[1]),
        tile=tuple(re.findall(r"\d+", tile))[-2:],
        num_warps=int(warps),
        num_buffers=int(buffers),
    )
