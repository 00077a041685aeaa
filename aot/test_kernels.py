"""Every kernel at every named shape compiles for every target, and is in the program."""

from hlo import kernel_calls

import pytest

from detspec.evals.kernel_shapes import KernelShape, attention_shapes, linear_shapes
from detspec.evals.planning import schedule_for
from detspec.targets import TARGETS, compile_for, target

SHAPES: tuple[KernelShape, ...] = (*attention_shapes(), *linear_shapes())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", TARGETS)
def test_kernel_compiles_for_target(name: str, shape: KernelShape):
    device = target(name)
    schedule = shape.schedule(schedule_for(device))
    compiled = compile_for(device, shape.function(schedule), *shape.operands(schedule))
    assert kernel_calls(compiled.program.as_text(), device.platform) == 1


def test_shapes_have_names_of_their_own():
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
