"""Determinism with the GPU kernel in Pallas's simulator: too slow there for drawn requests."""

import numpy as np
import pytest

from detspec.sampling_params import SamplingParams
from tests.fakes import FAMILY_CFGS, Request
from tests.generate.one_at_a_time import MAX_LEN, generate_all, make_schedule, one_at_a_time, results
from tests.gpu_simulator import simulated_programs_are_compiled_once  # noqa: F401


@pytest.mark.kernels
def test_committed_bits_with_the_gpu_kernel_equal_one_token_at_a_time():
    """Prefill in windows, drafts, a refused guess, and passes of two requests against one token at a time."""
    requests = [
        Request((5, 17, 9, 3, 60), SamplingParams(max_tokens=7)),
        Request((8, 2), SamplingParams(max_tokens=6, temperature=0.8, seed=3)),
    ]
    expected = [one_at_a_time(r, 8, FAMILY_CFGS["gemma2"], implementation="pallas_gpu") for r in requests]
    recorded = np.zeros((2, MAX_LEN), np.int32)
    for b, (tokens, _, _) in enumerate(expected):
        recorded[b, : len(tokens)] = tokens
    recorded[0, 7] += 1  # the third guess of the first window is refused
    state = generate_all(
        requests,
        schedule=make_schedule(8, 4, implementation="pallas_gpu"),
        source="recorded",
        cfg=FAMILY_CFGS["gemma2"],
        recorded=(recorded, np.full(2, MAX_LEN, np.int32)),
    )
    assert results(state) == expected
    assert state.counters.num_rollbacks.tolist()[0] >= 1
    assert (state.counters.num_accepted_draft_tokens > 0).all()
    by_reference = [one_at_a_time(r, 8, FAMILY_CFGS["gemma2"])[1] for r in requests]
    assert by_reference != [logprobs for _, logprobs, _ in expected]  # it was the kernel, with its own order
