"""Every kernel at every named shape compiles for every target, and is in the program."""

import pytest
from hlo import kernel_calls
from kernel_shapes import KernelShape, attention_shapes, compile_shape, linear_shapes

from detspec.targets import TARGETS, target

SHAPES: tuple[KernelShape, ...] = (*attention_shapes(), *linear_shapes())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", TARGETS)
def test_kernel_compiles_for_target(name: str, shape: KernelShape):
    compiled = compile_shape(shape, target(name))
    assert kernel_calls(compiled.program.as_text(), target(name).platform) == 1


def test_shapes_have_names_of_their_own():
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
