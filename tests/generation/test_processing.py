"""Penalties, bias and minimum length inside windows, on examples worked out by hand.

`table_model`: the next token has logit 4, all others 0; of equal logits the smallest token is chosen. On the table of `LOOP`,
3 follows 3, and with a frequency penalty of 2 the prompt [3] goes on with

    3: 4 (the prompt's 3 does not count)    3: 4-2    0: 3 has 4-4 as all others    1: 4    2: 4    3: 4-4, but 0 1 2 have -2
"""

import numpy as np
import pytest

from detspec.generation.insert import insert, pack_requests
from detspec.riders.rider import Entry
from detspec.sampling_params import SamplingParams
from detspec.state import LENGTH, STOP, GenState
from tests.fakes import COUNT_UP, TABLE_LOGPROB, Request, generate_drafted, recorded, state_of, table_model
from tests.shelf import TABLE

ALIGNED = TABLE.with_numerics(alignment="window")
LOOP = tuple(3 if t == 3 else up for t, up in enumerate(COUNT_UP))


def go_on(state: GenState, text=(), *, steps=TABLE.length, shape=TABLE, source="recorded", table=COUNT_UP) -> GenState:
    """Up to `steps` steps, the draft reading `text` for the first sequence."""
    return generate_drafted(table_model(table), shape, state, recorded(shape, [text]), np.int32(steps), source=source)


def start(prompt, *, shape=TABLE, max_tokens=6, **sampling) -> GenState:
    return state_of(shape, [Request(tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling))])


def text_of(state: GenState) -> list[int]:
    return state.tokens[0, : int(state.committed[0])].tolist()


# source, shape, and what the draft believes: nothing; the whole text; drafts that are rejected
WAYS = [
    ("recorded", TABLE, ()),
    ("recorded", TABLE, (3, 3, 3, 0, 1, 2, 3)),
    ("recorded", TABLE, (3, 4, 3, 3, 3, 3, 3)),
    ("recorded", ALIGNED, (3, 3, 3, 3, 3, 3, 3)),
    ("self", TABLE, ()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "shape", "text"), WAYS, ids=["none", "perfect", "rejected", "aligned", "self"])
def test_frequency_penalty_counts_committed_tokens_and_no_rejected_draft(source, shape, text):
    state = start([3], frequency_penalty=2.0, shape=shape)
    state = go_on(state, text, shape=shape, source=source, table=LOOP)
    assert text_of(state) == [3, 3, 3, 0, 1, 2, 3]
    if source == "self" or text == WAYS[1][2]:
        assert state.counters.num_rollbacks[0] == 0  # drafts before a choice are counted, in draft and pass alike
    if text == WAYS[2][2]:
        assert int(state.counters.num_rollbacks[0]) >= 1


def test_counting_the_rejected_drafts_would_choose_another_token():
    """Text [3 3] with the drafts 4 3 3 rejected: the next is 3. Had their counts stayed, as in the text [3 4 3 3 3]: 4 - 6.

    The same text as one prompt holds no new token: 3 again.
    """
    rejected = go_on(start([3], frequency_penalty=2.0), [3, 4, 3, 3], steps=1, table=LOOP)
    assert text_of(rejected) == [3, 3]
    assert text_of(go_on(rejected, steps=1, table=LOOP))[2:] == [3]
    params = SamplingParams(max_tokens=6, frequency_penalty=2.0)
    for prompt_len, following in ((1, 0), (None, 3)):
        state = start([3])
        state = insert(state, pack_requests(state, [Entry(0, [3, 4, 3, 3, 3], params, prompt_len)], ()))
        assert text_of(go_on(state, steps=1, table=LOOP))[5:] == [following]


@pytest.mark.parametrize("source", ["recorded", "self"])
def test_stop_token_inside_a_window_is_no_choice_before_min_tokens(source):
    """Stop token 5 would be the second new token; in its place comes 0, the smallest of equals. Later it ends the row."""
    asked = {"max_tokens": 12, "stop_token_ids": [5]}
    text = [1, 2, 3, 4, 5, 6]
    without = go_on(start([1, 2, 3], **asked), text, source=source)
    assert (text_of(without), without.finish.tolist()[:1]) == ([1, 2, 3, 4, 5], [STOP])
    state = go_on(start([1, 2, 3], min_tokens=3, **asked), text, source=source)
    assert (text_of(state), state.finish.tolist()[:1]) == ([1, 2, 3, 4, 0, 1, 2, 3, 4, 5], [STOP])


def test_min_tokens_bans_the_stop_token_up_to_its_last_position():
    """Stop token 5 is the second new token: one token must come, so it may; two must, so it may not."""
    texts = {n: text_of(go_on(start([1, 2, 3], min_tokens=n, max_tokens=3, stop_token_ids=[5]))) for n in (1, 2)}
    assert texts == {1: [1, 2, 3, 4, 5], 2: [1, 2, 3, 4, 0, 1]}


@pytest.mark.parametrize("source", ["recorded", "self"])
def test_bias_forces_a_token_and_leaves_its_raw_log_probability(source):
    """5 beats the 4 of the table; the log-probability is that of logit 0."""
    state = go_on(start([1, 2, 3], logit_bias={9: 5.0}, max_tokens=4), [1, 2, 3, 9, 4], source=source)
    assert (text_of(state), state.finish.tolist()[:1]) == ([1, 2, 3, 9, 9, 9, 9], [LENGTH])
    # float32 against float64, numbers of size 5.
    np.testing.assert_allclose(state.logprobs[0, 3:7], TABLE_LOGPROB - 4, rtol=0, atol=2e-6)
    weaker = go_on(start([1, 2, 3], logit_bias={9: 3.9}, max_tokens=4), [1, 2, 3, 9, 4], source=source)
    assert text_of(weaker) == [1, 2, 3, 4, 5, 6, 7]


def test_repetition_penalty_counts_the_prompt():
    """Token 9 has 3: more than 4 / 2 of a token that was seen, less than the 4 of one that was not."""
    asked = {"logit_bias": {9: 3.0}, "repetition_penalty": 2.0, "max_tokens": 1}
    assert text_of(go_on(start([4, 1, 2, 3], **asked))) == [4, 1, 2, 3, 9]
    assert text_of(go_on(start([1, 2, 3], **asked))) == [1, 2, 3, 4]
