"""Reading with thoughts by the kernels of TPUs and GPUs, in Pallas's simulators: too slow there for drawn prompts."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from detspec.model.dense import with_fields
from detspec.sampling_params import SamplingParams
from detspec.state import GenState
from detspec.thinking.think_prompt import think_prompt
from tests.fakes import Request, state_of
from tests.generation.one_at_a_time import KERNELS
from tests.gpu_simulator import simulated_programs_are_compiled_once  # noqa: F401
from tests.shelf import THINKER, Shape
from tests.thinking.fakes import THINKER_CFG, random_thinker
from tests.thinking.test_think_prompt import facts

# Less for the simulators to do: one KV head, thoughts of up to three tokens, no layer after the one that is thought about.
CFG = with_fields(THINKER_CFG, num_kv_heads=1, num_layers=2, thinking=dataclasses.replace(THINKER_CFG.thinking, max_thought=3))
PLAIN = THINKER._replace(cfg=CFG, batch=2, length=32)
PROMPTS = [np.random.default_rng(seed).integers(0, CFG.vocab_size, length).tolist() for seed, length in ((1, 14), (2, 9))]
REQUESTS = [Request(tuple(prompt), SamplingParams(max_tokens=2)) for prompt in PROMPTS]


def read(shape: Shape, requests, thoughts=None) -> GenState:
    return reading(random_thinker(shape.cfg), shape, state_of(shape, requests, thoughts))


@partial(jax.jit, static_argnames="shape")
def reading(params, shape: Shape, state: GenState) -> GenState:
    return think_prompt(params, shape.cfg, state, schedule=shape.schedule)


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_speculative_reading_with_a_kernel_equals_reading_one_prompt_at_a_time(implementation):
    """Trivial drafts of one prompt, then drafts of which one is wrong, in passes of two prompts."""
    shape = PLAIN.with_numerics(**KERNELS[implementation])
    expected = [facts(read(shape, [request]))[0] for request in REQUESTS]
    thoughts = [[[token for token in thought if token >= 0] for thought in row[0]] for row in expected]
    assert any(thought != [0] for thought in thoughts[0])
    thoughts[0][1] = [7, *thoughts[0][1][1:]] if thoughts[0][1][0] != 7 else [9]
    together = read(shape, REQUESTS, thoughts)
    assert facts(together) == expected
    assert together.counters.num_rejected_thoughts.tolist() == [1, 0]
    assert (together.counters.num_accepted_thoughts > 0).all()
    by_reference = [facts(read(PLAIN, [request]))[0] for request in REQUESTS]
    assert [row[2] for row in by_reference] != [row[2] for row in expected]  # it was the kernel, with its own order
