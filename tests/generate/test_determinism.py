"""The contract: committed tokens and the bits of their log-probabilities do not depend on how, where or beside whom.

Everything about a batch is drawn; its inverse control is in test_neighbours.py.
"""

import dataclasses
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.config import ModelConfig
from detspec.sampling_params import SamplingParams
from detspec.state import GenState
from tests.fakes import ALIBI_CFG, FAMILY_CFGS, Request
from tests.generate.one_at_a_time import (
    BF16,
    F32,
    MAX_NEW,
    PROCESSING,
    V,
    generate_all,
    guesses,
    make_schedule,
    one_at_a_time,
    poisoned,
    results,
)

MAX_PROMPT = 20

# (model, rows, window, batch, draft source): few rows and many, one-row windows and windows of a page, more and fewer requests
# than windows in a pass. A fixed list, so that the number of compilations is bounded.
CASES = (
    (BF16, 16, 4, 3, "both"),
    (BF16, 16, 16, 2, "recorded"),
    (BF16, 64, 1, 3, "none"),
    (BF16, 64, 8, 1, "recorded"),
    (BF16, 64, 16, 8, "recorded"),
    (F32, 64, 8, 4, "both"),
)
ALIGNED_CASES = ((BF16, 16, 4, 3, "recorded"), (F32, 64, 8, 4, "both"))
# All but `explain`: it runs a failing example some hundred times more.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
DRAFTS = ("perfect", "wrong", "random", "partly right", "empty")


def asking(processing: dict, *, max_tokens: int, **others) -> SamplingParams:
    """Sampling parameters with `processing`, its minimum length cut to `max_tokens`."""
    processing = {**processing, "min_tokens": min(processing.get("min_tokens", 0), max_tokens)}
    return SamplingParams(max_tokens=max_tokens, **processing, **others)


samplings = st.builds(
    asking,
    st.sampled_from(PROCESSING),
    max_tokens=st.integers(1, MAX_NEW),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 2**32 - 1),
    stop_token_ids=st.sampled_from([(), tuple(range(0, V, 9))]),  # 24 of 211 tokens stop, or none
    logprobs_mode=st.sampled_from(["raw", "raw", "processed"]),
    deterministic=st.sampled_from([True, True, True, False]),
)
prompts = st.lists(st.integers(0, V - 1), min_size=1, max_size=MAX_PROMPT).map(tuple)
all_requests = st.builds(Request, prompt=prompts, sampling=samplings)


long_requests = all_requests.map(
    lambda r: Request(r.prompt, dataclasses.replace(r.sampling, max_tokens=max(8, r.sampling.max_tokens), deterministic=True))
)


def case_name(case: tuple) -> str:
    cfg, *rest = case
    return "{}-rows{}-window{}-batch{}-{}".format(cfg.dtype, *rest)


def check_theorem(
    data: st.DataObject,
    case: tuple[ModelConfig, int, int, int, str],
    alignment: str,
    seen: Counter,
    implementation: str = "reference",
) -> None:
    """One batch of `case`'s shape, all else drawn: every deterministic row equals its reference."""
    cfg, rows, window, batch, source = case
    schedule = make_schedule(rows, window, alignment, implementation)
    # The first row is long, deterministic and badly guessed, so that every example shows something.
    requests = [data.draw(long_requests), *data.draw(st.lists(all_requests, min_size=batch - 1, max_size=batch - 1))]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    poison = data.draw(st.booleans())
    aligned_window = window if alignment == "window" else None
    expected = [one_at_a_time(r, rows, cfg, aligned_window, implementation) for r in requests]
    kinds = data.draw(st.lists(st.sampled_from(DRAFTS), min_size=batch - 1, max_size=batch - 1))
    kinds = [data.draw(st.sampled_from(("partly right", "wrong"))), *kinds]
    told = [guesses(kind, r, answer[0], rng) for kind, r, answer in zip(kinds, requests, expected, strict=True)]
    recorded = np.stack([tokens for tokens, _ in told])
    recorded_length = np.asarray([length for _, length in told], np.int32)

    state = generate_all(
        requests,
        schedule=schedule,
        source=source,
        cfg=cfg,
        recorded=(recorded, recorded_length),
        spoil=lambda state: scatter_and_poison(state, rng, poison),
    )
    assert not state.live.any()
    assert (state.cache.length == state.committed - 1).all()
    for b, (request, got) in enumerate(zip(requests, results(state), strict=True)):
        if request.sampling.deterministic:
            assert got == expected[b], f"row {b}, draft {kinds[b]}, {request}"
            seen["rollbacks"] += int(state.counters.num_rollbacks[b])
            seen["accepted"] += int(state.counters.num_accepted_draft_tokens[b])


def scatter_and_poison(state: GenState, rng: np.random.Generator, poison: bool) -> GenState:
    """Hands the pages out in another order, and leaves large numbers in every slot."""
    pages = state.cache.page_table.size
    table = 1 + rng.permutation(pages).reshape(state.cache.page_table.shape).astype(np.int32)
    cache = state.cache.replace(page_table=jnp.asarray(table))
    if poison:
        cache = cache.replace(**{name: poisoned(getattr(cache, name), rng) for name in ("k", "v")})
    return state.replace(cache=cache)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_committed_bits_for_any_draft_neighbours_and_places_equal_one_token_at_a_time(case):
    seen: Counter = Counter()

    @hypothesis.settings(max_examples=10, phases=PHASES)
    @hypothesis.given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_theorem(data, case, "free", seen)

    check()
    if case[-1] != "none":  # else the comparison would have shown little
        assert seen["rollbacks"] >= 1
        assert seen["accepted"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILY_CFGS, "alibi"])
def test_committed_bits_of_every_family_equal_one_token_at_a_time(family):
    """Sliding windows, soft caps, biases, norms of heads, rotary scalings, linear biases: the texts run past all lengths."""
    cfg = {**FAMILY_CFGS, "alibi": ALIBI_CFG}[family]
    seen: Counter = Counter()

    @hypothesis.settings(max_examples=6, phases=PHASES)
    @hypothesis.given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_theorem(data, (cfg, 16, 4, 3, "recorded"), "free", seen)

    check()
    assert seen["rollbacks"] >= 1
    assert seen["accepted"] >= 1


@pytest.mark.kernels
def test_committed_bits_with_the_tpu_kernel_equal_one_token_at_a_time():
    """In Pallas's interpreter, by the kernel's own order of operations: prefill, drafts, passes and the plain way."""
    seen: Counter = Counter()

    @hypothesis.settings(max_examples=5, phases=PHASES)
    @hypothesis.given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_theorem(data, (FAMILY_CFGS["gemma2"], 16, 4, 3, "recorded"), "free", seen, "pallas_tpu")

    check()
    assert seen["rollbacks"] >= 1
    assert seen["accepted"] >= 1


@pytest.mark.parametrize("case", ALIGNED_CASES, ids=case_name)
def test_committed_bits_with_aligned_windows_equal_one_token_at_a_time_of_the_same_window(case):
    seen: Counter = Counter()

    @hypothesis.settings(max_examples=10, phases=PHASES)
    @hypothesis.given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_theorem(data, case, "window", seen)

    check()
    assert seen["rollbacks"] >= 1
    assert seen["accepted"] >= 1
