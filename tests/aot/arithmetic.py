"""Reads which arithmetic of XLA's stands between the kernels of a program, however it is cut into fusions.

XLA fuses as it likes, and that changes no bit as long as operations, their order and their roundings stay the same. It may also
rewrite: leave out a rounding to bfloat16 whose result goes on in float32, or multiply by a reciprocal instead of dividing.
Programs that did the same everywhere have the same arithmetic here.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable

from fixed_order import APART, KERNELS, kernel_of, target_of
from instructions import Instruction, instructions

# What moves numbers, the rows that pad a tile among them, and its operand that has the numbers.
MOVES = {
    **dict.fromkeys(("bitcast", "broadcast", "copy", "reshape", "reverse", "slice", "transpose"), 0),
    **dict.fromkeys(("dynamic-slice", "gather", "pad"), 0),
    "dynamic-update-slice": 1,
    "scatter": 2,
}
COMMUTATIVE = ("add", "multiply", "maximum", "minimum", "and", "or", "xor")
OPAQUE = ("while", "conditional", "call", "iota", "reduce", "reduce-window", "sort")


def arithmetic(hlo: str, *, apart: Iterable[str] = APART) -> dict[tuple[str, str], set[tuple[str, ...]]]:
    """Finds what leads to the operands of each kernel of the program `hlo`: digests by the kernel's name and layer.

    A digest covers all operations with floats since the kernels before, or since what the program or its loop was given. Places
    in an array are left out, so slices of one array are told apart by what is done with them alone; so are integers.
    """
    return _Program(instructions(hlo)).of_kernels(set(apart))


class _Program:
    """Instructions by name, and what is known of their results."""

    def __init__(self, every: Iterable[Instruction]) -> None:
        self.by_name = {each.name: each for each in every}
        self.roots = {each.computation: each for each in self.by_name.values() if each.is_root}
        self.known: dict[tuple[str, tuple[str, ...]], str] = {}

    def of_kernels(self, apart: set[str]) -> dict[tuple[str, str], set[tuple[str, ...]]]:
        found: dict[tuple[str, str], set[tuple[str, ...]]] = defaultdict(set)
        for each in self.by_name.values():
            is_kernel = each.opcode == "custom-call" and target_of(each).startswith(KERNELS)
            if is_kernel and apart.isdisjoint(each.op_name.split("/")):
                kernel = kernel_of(each)
                floats = (operand for operand in each.operands if self.by_name[operand].is_float)
                found[kernel.name, kernel.layer].add(tuple(self.digest(operand, ()) for operand in floats))
        return dict(found)

    def digest(self, name: str, given: tuple[str, ...]) -> str:
        """Finds what leads to the result called `name`, in a fusion that is `given` the results of these digests."""
        if (name, given) not in self.known:
            self.known[name, given] = self._digest(self.by_name[name], given)
        return self.known[name, given]

    def _digest(self, each: Instruction, given: tuple[str, ...]) -> str:
        dtype = ",".join(shape.dtype for shape in each.shapes)
        if not each.is_float:
            return dtype
        if each.opcode == "parameter":
            return given[int(each.operands[0])] if given else f"given {dtype}"
        if each.opcode == "constant":
            return f"constant {dtype} {','.join(each.operands).strip('{ }')}"
        if each.opcode == "fusion":
            return self.digest(self.roots[each.called[0]].name, self._all(each, given))
        if each.opcode == "get-tuple-element":
            return self._element(each, dtype, given)
        if each.opcode in MOVES:
            return self.digest(each.operands[MOVES[each.opcode]], given)
        if each.opcode == "custom-call":
            return f"kernel {kernel_of(each).name}"
        if each.opcode in OPAQUE:
            return f"{each.opcode} {dtype}"
        parts = self._all(each, given)
        parts = tuple(sorted(parts)) if each.opcode in COMMUTATIVE else parts
        text = "|".join((each.opcode, dtype, each.attribute("direction="), *parts))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _all(self, each: Instruction, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.digest(operand, given) for operand in each.operands)

    def _element(self, each: Instruction, dtype: str, given: tuple[str, ...]) -> str:
        """A result of a fusion with several, a part of a tuple, or one of what a loop or a branch is given."""
        whole = self.by_name[each.operands[0]]
        index = int(each.attributes.partition("index=")[2].partition(",")[0])
        if whole.opcode == "tuple":
            return self.digest(whole.operands[index], given)
        if whole.opcode == "fusion":
            return self.digest(self.roots[whole.called[0]].operands[index], self._all(whole, given))
        return f"given {dtype}"
