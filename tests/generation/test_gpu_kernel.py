"""Determinism with the GPU kernel in Pallas's simulator: too slow there for drawn requests."""

import pytest

from detspec.sampling_params import SamplingParams
from tests.fakes import FAMILY_CFGS, Request, recorded
from tests.generation.one_at_a_time import KERNELS, generate_all, one_at_a_time, results
from tests.gpu_simulator import simulated_programs_are_compiled_once  # noqa: F401
from tests.shelf import TABLE

# Eight rows a pass: the simulator takes minutes for more.
PLAIN = TABLE._replace(cfg=FAMILY_CFGS["gemma2"], batch=2, length=48).with_numerics(page=16)
KERNEL = PLAIN.with_numerics(**KERNELS["pallas_gpu"])


@pytest.mark.kernels
def test_committed_bits_with_the_gpu_kernel_equal_one_token_at_a_time():
    """Prefill in windows, drafts, a rejected one, and passes of two requests against one token at a time."""
    requests = [
        Request((5, 17, 9, 3, 60), SamplingParams(max_tokens=7)),
        Request((8, 2), SamplingParams(max_tokens=6, temperature=0.8, seed=3)),
    ]
    expected = [one_at_a_time(r, KERNEL) for r in requests]
    told = [list(tokens) for tokens, _, _ in expected]
    told[0][7] += 1  # the third drafted token of the first window is rejected
    state = generate_all(KERNEL, requests, source="recorded", told=recorded(KERNEL, told))
    assert results(state) == expected
    assert state.counters.num_rollbacks.tolist()[0] >= 1
    assert (state.counters.num_accepted_draft_tokens > 0).all()
    by_reference = [one_at_a_time(r, PLAIN)[1] for r in requests]
    assert by_reference != [logprobs for _, logprobs, _ in expected]  # it was the kernel, with its own order
