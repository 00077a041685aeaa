"""Requests that were taken out half way, or whose cache was lost, go on with the same bits."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.generation.insert import insert, pack_requests
from detspec.riders.rider import Entry
from detspec.state import GenState
from tests.fakes import Request, generate_drafted, random_model, state_of
from tests.generation.one_at_a_time import FIXED, PROCESSING, one_at_a_time, partly_right, poisoned, results
from tests.shelf import MANY

PENALISED = [
    Request(r.prompt, dataclasses.replace(r.sampling, **processing))
    for r, processing in zip(FIXED, itertools.islice(itertools.cycle(PROCESSING[2:]), len(FIXED)), strict=True)
]


def steps(state: GenState, requests: Sequence[Request], number: int) -> GenState:
    """Up to `number` steps more, drafts wrong now and then."""
    told = partly_right(MANY, requests)
    return generate_drafted(random_model(MANY.cfg), MANY, state, told, np.int32(number), source="recorded")


@pytest.mark.slow
def test_request_put_in_again_with_its_new_tokens_goes_on_with_the_same_bits():
    """Two steps, then prompts and new tokens put into a fresh state, which runs to the end."""
    expected = [one_at_a_time(request) for request in PENALISED]
    state = steps(state_of(MANY, PENALISED), PENALISED, 2)
    assert state.live.all()
    tokens, logprobs, committed = jax.device_get((state.tokens, state.logprobs, state.committed))
    prompt_lens = [len(request.prompt) for request in PENALISED]
    fresh = state_of(MANY, FIXED)
    entries = []
    for b, (request, start, n) in enumerate(zip(PENALISED, prompt_lens, committed, strict=True)):
        new = logprobs[b, start:n].tolist()
        entries.append(Entry(b, tokens[b, :n].tolist(), request.sampling, prompt_len=start, logprobs=new))
    assert results(steps(insert(fresh, pack_requests(fresh, entries, ())), PENALISED, MANY.length)) == expected
    # The penalties did something; that they would do another thing without `prompt_len` is shown in test_processing.py.
    assert all(answer[0] != one_at_a_time(plain)[0] for answer, plain in zip(expected, FIXED, strict=True))


def replayed(*, after_steps: int, refill: bool) -> list[tuple]:
    """FIXED generated in two parts, between which the pages are spoilt; `refill` lets prefill write them again."""
    state = steps(state_of(MANY, FIXED), FIXED, after_steps)
    assert state.live.all()
    rng = np.random.default_rng(1)
    cache = state.cache.replace(pools=poisoned(state.cache.pools, rng))
    if refill:
        cache = cache.replace(length=jnp.zeros_like(cache.length))
    return results(steps(state.replace(cache=cache), FIXED, MANY.length))


@pytest.mark.slow
@pytest.mark.parametrize("after_steps", [0, 1, 3])
def test_replay_after_a_dropped_cache_changes_nothing(after_steps):
    assert replayed(after_steps=after_steps, refill=True) == [one_at_a_time(request) for request in FIXED]


def test_replay_without_refilling_a_spoilt_cache_changes_the_text():
    spoilt = replayed(after_steps=3, refill=False)
    assert spoilt != [one_at_a_time(request) for request in FIXED]
