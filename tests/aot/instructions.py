"""Reads the instructions of optimised HLO, those inside fusions and loops too."""

import dataclasses
import re
from collections.abc import Iterator

HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(, .*)?$")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|comparator)=%?([\w.\-]+)")
COMMENT = re.compile(r"/\*.*?\*/")  # the number of an operand
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dtype as HLO names it, and sizes: "bf16", (64, 512)."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        """Whether the elements are floats of any width."""
        return self.dtype.startswith(("f", "bf"))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a program.

    Attributes:
        name: unique in its program, like the names of others that it mentions.
        shapes: of the result; several of a tuple.
        opcode: "add", "fusion", "custom-call" and so on.
        operands: names of instructions, or what a constant is.
        attributes: the rest of its line.
        computation: the name of the fusion, loop or program that holds it.
        is_root: whether its result is that of the computation.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    computation: str
    is_root: bool

    @property
    def is_float(self) -> bool:
        """Whether one of its results is."""
        return any(shape.is_float for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """The path in the program that was traced: "jit(run_segment)/while/body/verify/layer_0/mlp/mul"; "" if it has none."""
        return self.attribute('op_name="')

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        return tuple(CALLED.findall(self.attributes.partition("backend_config=")[0]))

    def attribute(self, opening: str) -> str:
        """The text after `opening` up to the next quotation mark; "" if there is none."""
        return self.attributes.partition(opening)[2].partition('"')[0]


def instructions(hlo: str) -> Iterator[Instruction]:
    """All instructions of the text `hlo` in its order."""
    computation = ""
    for line in hlo.splitlines():
        if header := HEADER.match(line):
            computation = header[1]
        elif found := INSTRUCTION.match(line):
            root, name, result, opcode, operands, attributes = found.groups()
            names = tuple(operand.strip().lstrip("%") for operand in COMMENT.sub("", operands).split(",") if operand.strip())
            yield Instruction(name, shapes_in(result), opcode, names, attributes or "", computation, bool(root))


def shapes_in(text: str) -> tuple[Shape, ...]:
    """The shapes that `text` names, in its order."""
    return tuple(Shape(dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, sizes in SHAPE.findall(text))
