"""Determinism with the kernels of TPUs and GPUs in Pallas's simulators, too slow there for drawn requests; and in int8."""

import numpy as np
import pytest

from detspec.model.dense import with_fields
from detspec.sampling_params import SamplingParams
from tests.fakes import FAMILY_CFGS, Request, recorded
from tests.generation.one_at_a_time import KERNELS, generate_all, one_at_a_time, results, scatter_and_poison
from tests.gpu_simulator import simulated_programs_are_compiled_once  # noqa: F401
from tests.shelf import TABLE

# Eight rows a pass and one KV head: the simulators take minutes for more.
CFG = with_fields(FAMILY_CFGS["gemma2"], num_kv_heads=1)
PLAIN = TABLE._replace(cfg=CFG, batch=2, length=48).with_numerics(page=16)
REQUESTS = [
    Request((5, 17, 9, 3, 60, 2, 11, 8, 4, 31, 7, 19, 5), SamplingParams(max_tokens=4)),  # into its second page of 16
    Request((8, 2), SamplingParams(max_tokens=3, temperature=0.8, seed=3)),
]


@pytest.mark.kernels
@pytest.mark.parametrize(
    "implementation", [pytest.param(name, marks=[pytest.mark.slow] * (name != "pallas_gpu")) for name in KERNELS]
)
def test_committed_bits_with_a_kernel_equal_one_token_at_a_time(implementation):
    """Prefill in windows, drafts, a rejected one, and passes of two requests over scattered, poisoned pages, against one token
    at a time.
    """
    shape = PLAIN.with_numerics(**KERNELS[implementation])
    expected = [one_at_a_time(r, shape) for r in REQUESTS]
    told = [list(tokens) for tokens, _, _ in expected]
    told[0][len(REQUESTS[0].prompt) + 2] += 1  # the third drafted token of the first window is rejected

    def spoil(state):
        return scatter_and_poison(state, np.random.default_rng(0), poison=True)

    state = generate_all(shape, REQUESTS, source="recorded", told=recorded(shape, told), spoil=spoil)
    assert results(state) == expected
    assert state.counters.num_rollbacks.tolist()[0] >= 1
    assert (state.counters.num_accepted_draft_tokens > 0).all()
    by_reference = [one_at_a_time(r, PLAIN)[1] for r in REQUESTS]
    assert by_reference != [logprobs for _, logprobs, _ in expected]  # it was the kernel, with its own order
