"""Requests that were taken out half way, or whose cache was lost, go on with the same bits."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.generate.insert import insert, pack_requests
from detspec.state import GenState
from tests.fakes import Request, generate_drafted, random_model, state_of
from tests.generate.one_at_a_time import (
    BF16,
    FIXED,
    MAX_LEN,
    PROCESSING,
    make_schedule,
    one_at_a_time,
    partly_right,
    poisoned,
    results,
)

SCHEDULE = make_schedule(64, 8)
PENALISED = [
    Request(r.prompt, dataclasses.replace(r.sampling, **processing))
    for r, processing in zip(FIXED, itertools.islice(itertools.cycle(PROCESSING[2:]), len(FIXED)), strict=True)
]


def steps(state: GenState, requests: Sequence[Request], number: int) -> GenState:
    """Up to `number` steps more, guesses wrong now and then."""
    recorded, lengths = partly_right(requests)
    params, num_steps = random_model(BF16), np.int32(number)
    return generate_drafted(params, BF16, state, recorded, lengths, num_steps, schedule=SCHEDULE, source="recorded")


def test_request_put_in_again_with_its_new_tokens_goes_on_with_the_same_bits():
    """Two steps, then prompts and new tokens put into a fresh state, which runs to the end."""
    expected = [one_at_a_time(request) for request in PENALISED]
    state = steps(state_of(BF16, PENALISED, schedule=SCHEDULE, max_len=MAX_LEN), PENALISED, 2)
    assert state.live.all()
    tokens, logprobs, committed = jax.device_get((state.tokens, state.logprobs, state.committed))
    prompt_lens = [len(request.prompt) for request in PENALISED]
    fresh = state_of(BF16, FIXED, schedule=SCHEDULE, max_len=MAX_LEN)
    requests = pack_requests(
        fresh,
        range(len(PENALISED)),
        [row[:n].tolist() for row, n in zip(tokens, committed, strict=True)],
        [request.sampling for request in PENALISED],
        eos_ids=(),
        prompt_lens=prompt_lens,
        logprobs=[row[start:n].tolist() for row, start, n in zip(logprobs, prompt_lens, committed, strict=True)],
    )
    assert results(steps(insert(fresh, requests), PENALISED, MAX_LEN)) == expected
    # The penalties did something; that they would do another thing without `prompt_lens` is shown in test_processing.py.
    assert all(answer[0] != one_at_a_time(plain)[0] for answer, plain in zip(expected, FIXED, strict=True))


def replayed(*, after_steps: int, refill: bool) -> list[tuple]:
    """FIXED generated in two parts, between which the pages are spoilt; `refill` lets prefill write them again."""
    state = steps(state_of(BF16, FIXED, schedule=SCHEDULE, max_len=MAX_LEN), FIXED, after_steps)
    assert state.live.all()
    rng = np.random.default_rng(1)
    cache = state.cache.replace(**{name: poisoned(getattr(state.cache, name), rng) for name in ("k", "v")})
    if refill:
        cache = cache.replace(length=jnp.zeros_like(cache.length))
    return results(steps(state.replace(cache=cache), FIXED, MAX_LEN))


@pytest.mark.parametrize("after_steps", [0, 1, 3])
def test_replay_after_a_dropped_cache_changes_nothing(after_steps):
    assert replayed(after_steps=after_steps, refill=True) == [one_at_a_time(request) for request in FIXED]


def test_replay_without_refilling_a_spoilt_cache_changes_the_text():
    spoilt = replayed(after_steps=3, refill=False)
    assert spoilt != [one_at_a_time(request) for request in FIXED]
