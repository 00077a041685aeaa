"""Finds what a program for a GPU leaves to a library, a tuner or chance, and what it computes by kernels of this project.

Committed bits may depend on neither. So a canonical program holds no product but those of kernels or of integers, no sum of
floats but additions that the program spells out, and nothing whose result depends on which thread comes first. Drafts, and what
decides how many drafts are read, are free: no committed bit depends on them.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from instructions import Instruction, instructions, shapes_in

APART = ("draft", "allot")  # scopes of what decides no committed bit
KERNELS = "mosaic_gpu"  # how targets of Pallas's custom calls begin
PRODUCTS = ("dot", "ragged-dot", "scaled-dot", "convolution")
PRODUCT = "pinned_linear"  # the name of the kernel of products
SUMS = ("reduce", "reduce-window", "all-reduce", "all-reduce-start", "reduce-scatter", "select-and-scatter")
# Functions that each of XLA's emitters approximates in its own way, and the operations whose fusions it may emit by either.
APPROXIMATED = {"cosine", "divide", "exponential", "log", "logistic", "power", "rsqrt", "sine", "sqrt", "tanh"}
TUNED = {"reduce", "transpose"}
DRAWS = ("rng", "rng-bit-generator")
ROUNDS = ("add", "subtract", "multiply", "divide")  # what makes the order of a reduction matter; a maximum is exact


class Offence(NamedTuple):
    """An instruction whose result depends on a choice."""

    kind: str
    name: str  # of the instruction
    op_name: str  # where the traced program has it


class Kernel(NamedTuple):
    """A call of a kernel of this project."""

    name: str
    layer: str  # "layer_0"; "" outside of layers
    rows: int  # of its first operand
    others: tuple[str, ...]  # its other operands: weights


class Product(NamedTuple):
    """A product, as calls of its kernel for any number of rows have it in common."""

    layer: str
    weights: tuple[str, ...]


def offences(hlo: str, *, apart: Iterable[str] = APART) -> list[Offence]:
    """The instructions of `hlo`, outside the scopes `apart`, that leave the order of operations to something else."""
    every = list(instructions(hlo))
    opcodes: dict[str, set[str]] = defaultdict(set)
    for each in every:
        if each.is_float:
            opcodes[each.computation].add(each.opcode)
    places = {each.name for each in every if each.opcode == "parameter" and not each.is_float}
    ordering = {each.computation for each in every if each.opcode == "compare" and places.issuperset(each.operands)}
    scopes = set(apart)
    return [
        Offence(kind, each.name, each.op_name)
        for each in every
        if scopes.isdisjoint(each.op_name.split("/")) and (kind := _kind(each, opcodes, ordering))
    ]


def kernels(hlo: str, *, apart: Iterable[str] = APART) -> list[Kernel]:
    """The calls of this project's kernels in `hlo`, outside the scopes `apart`; the name is that of `plgpu.kernel`."""
    scopes = set(apart)
    return [
        kernel_of(each)
        for each in instructions(hlo)
        if each.opcode == "custom-call" and target_of(each).startswith(KERNELS) and scopes.isdisjoint(each.op_name.split("/"))
    ]


def products(found: Iterable[Kernel]) -> Counter[Product]:
    """How often each product is among kernels, whatever its number of rows."""
    return Counter(Product(k.layer, k.others) for k in found if k.name == PRODUCT)


def _kind(each: Instruction, opcodes: Mapping[str, set[str]], ordering: set[str]) -> str:
    """Says what is wrong with an instruction; "" if nothing is.

    `opcodes` are those of floats, by computation; computations that are `ordering` compare integers that they are given, as
    places of equals.
    """
    combined = set().union(*(opcodes[name] for name in each.called if name in opcodes))
    rounds = each.is_float and not combined.isdisjoint(ROUNDS)
    if each.opcode in PRODUCTS and each.is_float:
        return "product that XLA may cut"
    if each.opcode == "custom-call" and not target_of(each).startswith(KERNELS) and each.is_float:
        return f"library: {target_of(each)}"
    if each.opcode == "fusion" and each.is_float and combined & TUNED and combined & APPROXIMATED:
        return "function in a fusion that XLA tunes"
    if each.opcode in SUMS and rounds:
        return "sum in an order of XLA's"
    if each.opcode == "scatter" and rounds and "unique_indices=true" not in each.attributes:
        return "sum in the order of threads"
    if each.opcode == "sort" and "is_stable=true" not in each.attributes and ordering.isdisjoint(each.called):
        return "sort that may swap equals"
    return "random numbers of XLA's" if each.opcode in DRAWS else ""


def target_of(each: Instruction) -> str:
    """The target of a custom call."""
    return each.attribute('custom_call_target="')


def kernel_of(each: Instruction) -> Kernel:
    """A call of a kernel."""
    given = shapes_in(each.attributes.partition("operand_layout_constraints={")[2].partition("}}")[0])
    path = each.op_name.split("/")
    return Kernel(
        name=path[-2] if len(path) > 1 else "",
        layer=next((part for part in path if re.fullmatch(r"layer_\d+", part)), ""),
        rows=given[0].sizes[0],
        others=tuple(str(shape) for shape in given[1:]),
    )
