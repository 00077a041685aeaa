"""Reading with thoughts by the kernels of TPUs and GPUs, in Pallas's simulators: too slow there for drawn prompts."""

import numpy as np
import pytest

from detspec.generation.loop import generate_state
from detspec.sampling_params import SamplingParams
from tests.fakes import Request, state_of
from tests.generation.one_at_a_time import KERNELS
from tests.gpu_simulator import simulated_programs_are_compiled_once  # noqa: F401
from tests.shelf import THINKER, Shape
from tests.thinking.fakes import THINKER_CFG, random_thinker
from tests.thinking.test_think_prompt import facts

PROMPTS = [
    np.random.default_rng(seed).integers(0, THINKER_CFG.vocab_size, length).tolist() for seed, length in ((0, 14), (3, 9))
]
REQUESTS = [Request(tuple(prompt), SamplingParams(max_tokens=2)) for prompt in PROMPTS]


def read_and_answer(requests, shape: Shape, thoughts=None):
    state = state_of(shape, requests, thoughts)
    return generate_state(random_thinker(THINKER_CFG), THINKER_CFG, state, schedule=shape.schedule)


@pytest.mark.kernels
@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_speculative_reading_with_a_kernel_equals_reading_one_prompt_at_a_time(implementation):
    """Trivial drafts alone, then drafts of which one is wrong, in passes of two prompts."""
    plain = THINKER._replace(batch=2, length=32)  # less for the simulators to do
    shape = plain.with_numerics(**KERNELS[implementation])
    alone = [read_and_answer([request], shape.alone) for request in REQUESTS]
    expected = [facts(state)[0] for state in alone]
    thoughts = [[[token for token in thought if token >= 0] for thought in row[0]] for row in expected]
    assert any(thought != [0] for thought in thoughts[0])
    thoughts[0][1] = [7, *thoughts[0][1][1:]] if thoughts[0][1][0] != 7 else [9]
    together = read_and_answer(REQUESTS, shape, thoughts)
    assert facts(together) == expected
    assert together.counters.num_rejected_thoughts.tolist() == [1, 0]
    assert (together.counters.num_accepted_thoughts > 0).all()
    by_reference = [facts(read_and_answer([request], plain.alone))[0] for request in REQUESTS]
    assert [row[2] for row in by_reference] != [row[2] for row in expected]  # it was the kernel, with its own order
