"""The automaton of `turns` along texts that are worked out by hand, and what the host says of requests. No model runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.generation.init import init_riders
from detspec.generation.insert import insert, pack_requests
from detspec.riders.counters import COUNTED, COUNTERS, Counters, Stats
from detspec.riders.rider import Capacity, Committed, Entry
from detspec.riders.riding import Riders, brought
from detspec.sampling_params import SamplingParams
from detspec.state import GenState
from tests.fakes import state_of
from tests.riders.turns import TURNS
from tests.shelf import TABLE

PROMPTS = ([3, 5], [7], [5, 5, 1])  # on, off, off before the first new token
TEXT = [8, 9, 10, 4]  # 10 turns


@pytest.fixture(scope="module")
def state() -> GenState:
    """Three requests: the first has two new tokens already, the second brings nothing."""
    empty = state_of(TABLE, [])
    capacity = Capacity(TABLE.batch, TABLE.length, 24, 4, TABLE.schedule)
    empty = empty.replace(riders=init_riders(TABLE.cfg, capacity, (TURNS,)))
    sampling = SamplingParams(max_tokens=8)
    brings = ({"turns": 1.5}, {}, {"turns": -2})
    new = ([10, 4], [], [])
    entries = [
        Entry(b, [*prompt, *more], sampling, prompt_len=len(prompt), brings=each)
        for b, (prompt, more, each) in enumerate(zip(PROMPTS, new, brings, strict=True))
    ]
    return insert(empty, pack_requests(empty, entries, ()))


def on(riders: Riders) -> list[bool]:
    return riders.of("turns").is_on[:3].tolist()


def test_request_begins_where_its_prompt_leads_and_goes_on_where_its_new_tokens_do(state):
    assert state.riders.of("turns").bias[:3].tolist() == [1.5, 0.0, -2.0]
    assert state.riders.states["turns"].first.is_on[:3].tolist() == [True, False, False]
    assert on(state.riders) == [False, False, False]  # the first has turned by its new token 10


def test_state_after_a_step_is_that_after_its_committed_tokens(state):
    tokens = jnp.asarray([TEXT, TEXT, TEXT, [0] * 4, [0] * 4], jnp.int32)
    after = state.riders.observed(Committed(tokens, jnp.asarray([0, 2, 3, 0, 0]), None))
    assert on(after) == [False, False, True]
    assert after.states["turns"].first.is_on[:3].tolist() == [True, False, False]


def test_rows_have_the_state_before_their_choice_wherever_they_begin(state):
    tokens = jnp.asarray([[*PROMPTS[0], *TEXT, *[0] * 18]] * TABLE.batch, jnp.int32)[:, : TABLE.length]
    begin = jnp.full(TABLE.batch, 2, jnp.int32)
    of_row = jnp.asarray([0, 0, 0, 1, 1], jnp.int32)
    after = jnp.asarray([0, 2, 3, 3, 4], jnp.int32)
    walked = state.riders.walked(tokens, begin, 4, anew=True)
    assert state.riders.rows(of_row, after, walked)["turns"].is_on.tolist() == [True, True, False, True, True]
    walked = state.riders.walked(tokens, begin, 4)
    assert state.riders.rows(of_row, after, walked)["turns"].is_on.tolist() == [False, False, True, True, True]
    assert state.riders.replace(processing=False).walked(tokens, begin, 4) == {}


def test_state_goes_on_token_by_token_as_along_a_text(state):
    riders = state.riders
    for token in TEXT:
        riders = riders.at(riders.after(jnp.full(TABLE.batch, token, jnp.int32)))
    assert on(riders) == [True, True, True]
    assert on(state.riders) == [False, False, False]


def test_keys_of_pages_and_facts_are_those_that_riders_say():
    keyed = TURNS._replace(page_key=lambda request: str(request.brings.get("turns", "")).encode())
    requests = [Request("a", (1,), SamplingParams(), brings={"turns": bias}) for bias in (1, 2)]
    said = [brought((COUNTERS, keyed), request) for request in requests]
    assert said[0].facts == {"turns": 1.0}
    assert said[0].page_key != said[1].page_key
    assert brought((keyed,), Request("a", (1,), SamplingParams())) == ({}, b"", False)
    apart = TURNS._replace(page_key=lambda request: None)
    assert brought((apart,), requests[0]).page_key is None
    with pytest.raises(InputError, match="those of its riders"):
        brought((TURNS,), Request("a", (1,), SamplingParams(), brings={"counters": np.zeros(3)}))


def test_counters_print_with_their_names():
    lines = str(Stats(num_verify_passes=11, num_draft_tokens=1234, num_rollbacks=2)).splitlines()
    assert lines[0] == "num_verify_passes             11"
    assert lines[1] == "num_draft_tokens           1,234"
    assert [line.split()[0] for line in lines] == [*COUNTED, "draft_acceptance_rate", "mean_acceptance_length"]
    counters = Counters(np.arange(18, dtype=np.int32).reshape(2, 9))
    assert str(counters).splitlines()[1].split() == ["num_draft_tokens", "1", "10"]
    jax.eval_shape(lambda traced: [str(traced), traced][1], counters)  # inside a program there are no numbers
