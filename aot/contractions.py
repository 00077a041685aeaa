"""Products that a GPU's compiler may join with an addition into one multiply-add, which leaves out the product's rounding.

It does so within a kernel, so which of them it joins depends on how XLA fuses. A product that is exact has no rounding to leave
out: two factors of bfloat16 have 8 bits each, their product has 16 of the 24 that float32 holds.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from fixed_order import APART
from instructions import Instruction, instructions

SIGNIFICAND = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53, "pred": 1, "s8": 7, "u8": 8}  # bits, the leading one included
MOVES = ("bitcast", "broadcast", "copy", "reshape", "slice", "transpose", "dynamic-slice", "gather", "negate", "reverse")
ALL = 53


def contractions(hlo: str, *, apart: Iterable[str] = APART) -> Counter[str]:
    """How often the program of the text `hlo` adds to or subtracts from a rounded product in one kernel, by the place.

    The place is the path in the traced program, without loops. Kernels of this project are not looked into.
    """
    by_name: dict[str, Instruction] = {}
    users: dict[str, list[Instruction]] = defaultdict(list)
    for each in instructions(hlo):
        by_name[each.name] = each
        for operand in each.operands:
            users[operand].append(each)
    scopes = set(apart)
    found: Counter[str] = Counter()
    for each in by_name.values():
        if each.opcode == "multiply" and each.is_float and _bits(each, by_name) > SIGNIFICAND[each.shapes[0].dtype]:
            for user in _reached(each, users):
                path = [part for part in user.op_name.split("/") if part not in ("while", "body", "closed_call")]
                if user.opcode in ("add", "subtract") and scopes.isdisjoint(path):
                    found["/".join(path)] += 1
    return found


def _bits(each: Instruction, by_name: Mapping[str, Instruction]) -> int:
    """Bits of the significand that hold every value of an instruction, if no rounding is left out."""
    given = [by_name[name] for name in each.operands if name in by_name]
    if each.opcode == "multiply":
        return _bits(given[0], by_name) + _bits(given[-1], by_name)
    if each.opcode in MOVES:
        return _bits(given[0], by_name)
    if each.opcode == "convert":
        return min(_bits(given[0], by_name), SIGNIFICAND.get(each.shapes[0].dtype, ALL))
    if each.opcode == "constant" and each.operands and (value := _number(each.operands[0])) is not None:
        return 0 if math.frexp(value)[0] in (0.0, 0.5, -0.5) else SIGNIFICAND.get(each.shapes[0].dtype, ALL)
    return SIGNIFICAND.get(each.shapes[0].dtype, ALL)


def _number(text: str) -> float | None:
    try:
        return float(text.strip("{ }"))
    except ValueError:
        return None


def _reached(each: Instruction, users: Mapping[str, list[Instruction]]) -> list[Instruction]:
    """What uses a result in the same kernel, moved or not."""
    found = []
    for user in users[each.name]:
        found += _reached(user, users) if user.opcode in MOVES else [user]
    return found
