"""Draft, verify, commit on examples worked out by hand, on the model that counts up: after token t comes t + 1 (mod 16).

Prompt [1 2 3], W = 4. T0 = 3 at position p = 2 is the last committed token; its keys and values are not yet written, so
length is 2 = p. The targets after it are T1..T4 = 4 5 6 7.

    drafts 4 5 6   accepted 3   commit 4 5 6 and the bonus 7        committed 3 + 4, length p + 4 = 6
    drafts 4 5 9   accepted 2   commit 4 5 and the correction 6     committed 3 + 3, length p + 3 = 5
"""

import jax.numpy as jnp
import numpy as np
import pytest

from detspec.generation.insert import take_sequences
from detspec.sampling_params import SamplingParams
from detspec.state import LENGTH, NOT_FINITE, PAD_ID, RUNNING, STOP, GenState
from tests.fakes import COUNT_UP, TABLE_LOGPROB, Request, bits, generate_drafted, recorded, state_of, table_model
from tests.shelf import TABLE

MAX_LEN = TABLE.length
ALIGNED = TABLE.with_numerics(alignment="window")
PROMPT = (1, 2, 3)
BROKEN = 13


def request(prompt=PROMPT, max_tokens=12, **sampling) -> Request:
    return Request(tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling))


def step(requests, texts, *, steps=1, shape=TABLE, source="recorded", params=None) -> GenState:
    """The state of `requests` after `steps` steps, the draft reading `texts`: what it believes each whole sequence to be."""
    params = table_model() if params is None else params
    state = generate_drafted(params, shape, state_of(shape, requests), recorded(shape, texts), np.int32(steps), source=source)
    return take_sequences(state, np.arange(len(requests)))


def committed(state: GenState, row: int = 0) -> list[int]:
    tokens = state.tokens[row].tolist()
    num = int(state.committed[row])
    assert tokens[num:] == [PAD_ID] * (MAX_LEN - num)
    assert (np.asarray(state.logprobs[row])[num:] == 0).all()
    return tokens[:num]


def counters(state: GenState, row: int = 0) -> dict[str, int]:
    names = {
        "passes": "num_verify_passes",
        "drafted": "num_draft_tokens",
        "accepted": "num_accepted_draft_tokens",
        "rollbacks": "num_rollbacks",
        "recomputed": "num_recomputed_tokens",
    }
    return {short: int(getattr(state.counters, name)[row]) for short, name in names.items()}


def written(state: GenState, row: int = 0) -> int:
    """Leading positions of the row whose value vectors are in the pool (`weighted_model` writes none that is zero)."""
    table = state.cache.page_table[row]
    values = (
        np.asarray(state.cache.pools[0].v[table]).transpose(0, 2, 1, 3).reshape(len(table) * TABLE.schedule.numerics.page, -1)
    )
    filled = (values != 0).any(1)
    return int(filled.argmin())


def weighted_model():
    """`table_model` that writes values other than zero; the attention's output matrix is zero still, so texts are the same."""
    params = table_model()
    params["layers"][0]["v"] = jnp.ones_like(params["layers"][0]["v"])
    return params


def test_window_without_rollback_commits_all_drafts_and_the_bonus():
    state = step([request()], [[1, 2, 3, 4, 5, 6]])
    assert committed(state) == [1, 2, 3, 4, 5, 6, 7]
    assert state.cache.length.tolist() == [6]
    assert state.finish.tolist() == [RUNNING]
    assert counters(state) == {"passes": 1, "drafted": 3, "accepted": 3, "rollbacks": 0, "recomputed": 0}
    # float32 against float64 of 4 - log(e^4 + 15), numbers of size 4: a few units of 2**-22.
    np.testing.assert_allclose(state.logprobs[0, 3:7], TABLE_LOGPROB, rtol=0, atol=1e-6)
    assert (state.logprobs[0, :3] == 0).all()


def test_window_with_rejected_third_draft_commits_two_and_the_correction():
    state = step([request()], [[1, 2, 3, 4, 5, 9]])
    assert committed(state) == [1, 2, 3, 4, 5, 6]
    assert state.cache.length.tolist() == [5]  # keys and values up to the last accepted token T2 = 5 at position 4
    assert counters(state) == {"passes": 1, "drafted": 3, "accepted": 2, "rollbacks": 1, "recomputed": 1}


def test_window_with_rejected_first_draft_ignores_later_ones_that_happen_to_be_right():
    state = step([request()], [[1, 2, 3, 9, 5, 6]])
    assert committed(state) == [1, 2, 3, 4]
    assert state.cache.length.tolist() == [3]
    assert counters(state) == {"passes": 1, "drafted": 3, "accepted": 0, "rollbacks": 1, "recomputed": 3}


def test_step_after_a_rollback_opens_with_the_correction():
    state = step([request()], [[1, 2, 3, 4, 5, 9, 7, 8, 9]], steps=2)
    assert committed(state) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert state.cache.length.tolist() == [9]
    assert counters(state) == {"passes": 2, "drafted": 6, "accepted": 5, "rollbacks": 1, "recomputed": 1}


def test_rollback_leaves_stale_slots_beyond_the_length_only():
    """The rejected draft was written to position 5 and stays there; valid slots end before it."""
    state = step([request()], [[1, 2, 3, 4, 5, 9]], params=weighted_model())
    assert written(state) == 6
    assert state.cache.length.tolist() == [5]
    state = step([request()], [[1, 2, 3]], params=weighted_model())
    assert written(state) == 3
    assert state.cache.length.tolist() == [3]


def test_empty_draft_commits_exactly_one_token():
    state = step([request()], [[1, 2, 3]])
    assert committed(state) == [1, 2, 3, 4]
    assert state.cache.length.tolist() == [3]
    assert counters(state) == {"passes": 1, "drafted": 0, "accepted": 0, "rollbacks": 0, "recomputed": 0}


def test_stop_token_inside_the_accepted_run_voids_everything_after_it():
    state = step([request(stop_token_ids=(5,))], [[1, 2, 3, 4, 5, 6]])
    assert committed(state) == [1, 2, 3, 4, 5]  # the stop token is kept
    assert state.finish.tolist() == [STOP]
    assert state.live.tolist() == [False]
    assert state.cache.length.tolist() == [4]
    assert counters(state) == {"passes": 1, "drafted": 3, "accepted": 2, "rollbacks": 0, "recomputed": 0}


def test_stop_token_before_a_rejected_draft_counts_no_rollback():
    state = step([request(stop_token_ids=(4,))], [[1, 2, 3, 4, 9, 9]])
    assert committed(state) == [1, 2, 3, 4]
    assert state.finish.tolist() == [STOP]
    assert counters(state) == {"passes": 1, "drafted": 3, "accepted": 1, "rollbacks": 0, "recomputed": 0}


def test_stop_token_as_the_correction_ends_the_row():
    state = step([request(stop_token_ids=(6,))], [[1, 2, 3, 4, 5, 9]])
    assert committed(state) == [1, 2, 3, 4, 5, 6]
    assert state.finish.tolist() == [STOP]
    assert counters(state) == {"passes": 1, "drafted": 3, "accepted": 2, "rollbacks": 1, "recomputed": 1}


def test_rejected_draft_that_is_a_stop_token_does_not_end_the_row():
    state = step([request(stop_token_ids=(9,))], [[1, 2, 3, 4, 9]])
    assert committed(state) == [1, 2, 3, 4, 5]
    assert state.finish.tolist() == [RUNNING]


def test_stop_token_in_the_prompt_does_not_end_the_row():
    state = step([request(stop_token_ids=(2,))], [[1, 2, 3, 4, 5, 6]])
    assert committed(state) == [1, 2, 3, 4, 5, 6, 7]
    assert state.finish.tolist() == [RUNNING]


def test_stop_token_of_a_neighbour_does_not_end_the_row():
    text = [1, 2, 3, 4, 5, 6]
    state = step([request(stop_token_ids=(5,)), request(stop_token_ids=(6,))], [text, text])
    assert (committed(state, 0), committed(state, 1)) == ([1, 2, 3, 4, 5], text)


def test_max_tokens_inside_a_window_ends_the_row_there():
    """Two tokens are wanted, so only one is drafted: the pass adds the second."""
    state = step([request(max_tokens=2)], [[1, 2, 3, 4, 5, 6]])
    assert committed(state) == [1, 2, 3, 4, 5]
    assert state.finish.tolist() == [LENGTH]
    assert state.cache.length.tolist() == [4]
    assert counters(state) == {"passes": 1, "drafted": 1, "accepted": 1, "rollbacks": 0, "recomputed": 0}


def test_stop_token_at_max_tokens_counts_as_stop():
    state = step([request(max_tokens=2, stop_token_ids=(5,))], [[1, 2, 3, 4, 5, 6]])
    assert committed(state) == [1, 2, 3, 4, 5]
    assert state.finish.tolist() == [STOP]


def test_row_that_ended_is_left_alone_while_others_run():
    state = step([request(max_tokens=1), request(max_tokens=9)], [[], []], steps=9)
    assert committed(state, 0) == [1, 2, 3, 4]
    assert committed(state, 1) == [*range(1, 13)]
    assert counters(state, 0)["passes"] == 1
    assert counters(state, 1)["passes"] == 9
    assert state.cache.length.tolist() == [3, 11]


def test_text_that_fills_the_cache_to_its_last_position_ends_by_length():
    state = step([request(max_tokens=MAX_LEN - 3)], [[*range(1, 16), *range(9)]], steps=MAX_LEN)
    assert committed(state) == [t % 16 for t in range(1, MAX_LEN + 1)]
    assert state.finish.tolist() == [LENGTH]
    assert state.cache.length.tolist() == [MAX_LEN - 1]


def test_prompt_longer_than_a_pass_is_prefilled_in_several():
    """Rows of 13 and 3 prompt tokens miss 12 and 2: windows of 4, 3 + 1 of them, two to a pass of 8 rows: two passes."""
    long = tuple(range(1, 14))
    requests = [request(long), request(PROMPT)]
    state = step(requests, [[], []], steps=0, params=weighted_model())
    assert state.cache.length.tolist() == [12, 2]
    assert (written(state, 0), written(state, 1)) == (12, 2)
    state = step(requests, [[*long, 14, 15, 0], [1, 2, 3, 4, 5, 6]])
    assert committed(state, 0) == [*long, 14, 15, 0, 1]
    assert committed(state, 1) == [1, 2, 3, 4, 5, 6, 7]


def test_prompt_of_one_token_needs_no_prefill():
    state = step([request((7,))], [[]], steps=0, params=weighted_model())
    assert state.cache.length.tolist() == [0]
    assert written(state) == 0
    assert committed(step([request((7,))], [[7, 8, 9, 10]])) == [7, 8, 9, 10, 11]


def test_more_rows_than_windows_of_a_pass_are_all_verified_in_one_step():
    """Five rows in windows of four, two to a pass: three passes; each row counts one."""
    requests = [request((first,)) for first in range(5)]
    state = step(requests, [[first, first + 1, 15] for first in range(5)])
    assert [committed(state, b) for b in range(5)] == [[first, first + 1, first + 2] for first in range(5)]
    assert state.counters.num_verify_passes.tolist() == [1] * 5


def test_broken_logits_end_their_row_and_change_no_bit_of_another():
    """Token 13 has no finite embedding: the row that comes to it ends after it, nothing of what follows is committed."""
    params = table_model(broken=[BROKEN])
    requests = [request((10, 11)), request()]
    texts = [[10, 11, 12], [1, 2, 3, 4, 5, 6]]
    state = step(requests, texts, steps=3, params=params)
    assert committed(state, 0) == [10, 11, 12, BROKEN]
    assert state.finish.tolist() == [NOT_FINITE, RUNNING]
    assert np.isfinite(state.logprobs).all()
    alone = step(requests[1:], texts[1:], steps=3, params=params)
    assert committed(state, 1) == committed(alone, 0)
    assert bits(state.logprobs[1]).tolist() == bits(alone.logprobs[0]).tolist()


def test_draft_with_broken_keys_and_values_does_not_touch_the_places_before_it():
    """A bad draft costs speed, never correctness: with the draft 13 and without it, 12 and 13 are committed."""
    params = table_model(broken=[BROKEN])
    without = step([request((10, 11))], [[10, 11]], steps=3, params=params)
    drafted = step([request((10, 11))], [[10, 11, 12, BROKEN, 14]], steps=3, params=params)
    assert committed(without) == [10, 11, 12, BROKEN]
    assert committed(drafted) == committed(without)
    assert bits(drafted.logprobs).tolist() == bits(without.logprobs).tolist()
    assert drafted.finish.tolist() == without.finish.tolist() == [NOT_FINITE]


def test_broken_logits_at_once_commit_nothing():
    state = step([request((BROKEN,))], [[BROKEN, 14, 15]], params=table_model(broken=[BROKEN]))
    assert committed(state) == [BROKEN]
    assert state.finish.tolist() == [NOT_FINITE]
    assert state.live.tolist() == [False]


def test_broken_logits_of_an_unverified_row_end_it_too():
    sampling = {"deterministic": False}
    state = step([request((12,), **sampling)], [[]], steps=3, source="self", params=table_model(broken=[BROKEN]))
    assert committed(state) == [12, BROKEN]
    assert state.finish.tolist() == [NOT_FINITE]


def test_stop_token_before_broken_logits_counts_as_stop():
    state = step([request((12,), stop_token_ids=(BROKEN,))], [[12]], params=table_model(broken=[BROKEN]))
    assert committed(state) == [12, BROKEN]
    assert state.finish.tolist() == [STOP]


def test_ordinary_row_commits_its_drafts_unverified():
    """The drafts are wrong on purpose: the deterministic row corrects them, the ordinary row takes them as they are."""
    wrong = [1, 2, 3, 9, 9, 8]
    state = step([request(deterministic=False), request()], [wrong, wrong])
    assert committed(state, 0) == wrong
    assert committed(state, 1) == [1, 2, 3, 4]
    assert state.cache.length.tolist() == [5, 3]
    assert counters(state, 0) == {"passes": 0, "drafted": 0, "accepted": 0, "rollbacks": 0, "recomputed": 0}
    assert counters(state, 1) == {"passes": 1, "drafted": 3, "accepted": 0, "rollbacks": 1, "recomputed": 3}


def test_self_draft_agrees_with_the_pass_on_clear_answers():
    state = step([request(max_tokens=9)], [[]], steps=MAX_LEN, source="self")
    assert committed(state) == [*range(1, 13)]
    assert counters(state) == {"passes": 3, "drafted": 6, "accepted": 6, "rollbacks": 0, "recomputed": 0}


def test_self_draft_stops_drafting_at_a_stop_token():
    state = step([request(stop_token_ids=(5,))], [[]], source="self")
    assert committed(state) == [1, 2, 3, 4, 5]
    assert counters(state) == {"passes": 1, "drafted": 2, "accepted": 2, "rollbacks": 0, "recomputed": 0}


@pytest.mark.parametrize(("prompt_len", "new"), [(1, 4), (2, 3), (3, 2), (4, 1), (5, 4)])
def test_aligned_window_ends_at_a_multiple_of_its_length(prompt_len, new):
    """W = 4: a row of length 2 (T0 at position 2) has one place left for a draft, so it gains two tokens."""
    prompt = tuple(range(1, prompt_len + 1))
    state = step([request(prompt)] * 2, [[*range(1, 16)]] * 2, shape=ALIGNED)  # both windows of the pass are taken
    assert committed(state) == [*range(1, prompt_len + new + 1)]


@pytest.mark.parametrize("prompt_len", [1, 2, 3, 4, 5])
def test_aligned_guesses_go_on_in_the_next_window_if_the_pass_has_one_left(prompt_len):
    state = step([request(tuple(range(1, prompt_len + 1)))], [[*range(1, 16)]], shape=ALIGNED)
    assert committed(state) == [*range(1, prompt_len + 4 + 1)]


def test_aligned_windows_with_perfect_drafts_never_roll_back():
    """Drafts that found no place in the window were not rejected: they were not read."""
    state = step([request()] * 2, [[*range(1, 16)]] * 2, steps=2, shape=ALIGNED)
    assert committed(state) == [*range(1, 10)]
    assert counters(state) == {"passes": 2, "drafted": 4, "accepted": 4, "rollbacks": 0, "recomputed": 0}


def test_table_model_answers_by_its_table():
    """Another table gives another text: the examples above rest on the weights and not on the tokens' order."""
    backwards = [(t - 1) % 16 for t in range(16)]
    assert committed(step([request((9,))], [[]], steps=3, params=table_model(backwards))) == [9, 8, 7, 6]
    assert COUNT_UP[9] == 10
