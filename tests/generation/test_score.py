"""The canonical pass finds for given text what generation reported for it, bit for bit."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec import score
from detspec.errors import InputError
from detspec.generation.loop import generate
from detspec.generation.prefill import prefill
from detspec.generation.score import Asked, read, replay
from detspec.ops.row_sum import fixed_sum
from detspec.passes import spans
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.state import GenState
from tests.fakes import COUNT_UP, TABLE_CFG, TABLE_LOGPROB, Request, bits, random_model, state_of, table_model
from tests.shelf import FEW, TABLE

pytestmark = pytest.mark.optimised

CFG = FEW.cfg
PROMPTS = [np.random.default_rng(i).integers(0, CFG.vocab_size, 1 + 6 * i).tolist() for i in (0, 3, 2)]
SAMPLING = [
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=13, temperature=0.9, top_p=0.9, seed=5),
    SamplingParams(max_tokens=20, temperature=1.2, top_k=40, min_p=0.02, seed=6),
]
MAX_LEN = FEW.length


def schedule_of(window: int, alignment: str = "free") -> Schedule:
    return FEW.schedule.with_budget(16, window).with_numerics(alignment=alignment)


@cache
def generated(*, deterministic: bool = True, batch: int = 3, alignment: str = "free") -> list[tuple[list[int], np.ndarray]]:
    """Texts and the bits of the log-probabilities of their new tokens, of the first `batch` requests."""
    sampling = [dataclasses.replace(s, deterministic=deterministic) for s in SAMPLING[:batch]]
    state = generate(random_model(CFG), CFG, PROMPTS[:batch], sampling, schedule=schedule_of(4, alignment))
    tokens, logprobs, committed = jax.device_get((state.tokens, state.logprobs, state.committed))
    return [(tokens[b, :n].tolist(), bits(logprobs[b, len(PROMPTS[b]) : n])) for b, n in enumerate(committed)]


def scored(texts: list[list[int]], window: int, alignment: str = "free") -> list[np.ndarray]:
    return score(random_model(CFG), CFG, texts, schedule=schedule_of(window, alignment), max_len=MAX_LEN)


# Score ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("window", "order"), [(1, [2, 1]), (16, [0, 1, 2])])
def test_score_of_generated_text_has_the_bits_that_generation_reported(window, order):
    texts = generated()
    found = scored([texts[b][0] for b in order], window)
    for b, logprobs in zip(order, found, strict=True):
        assert len(logprobs) == len(texts[b][0])
        assert bits(logprobs[len(PROMPTS[b]) :]).tolist() == texts[b][1].tolist()


@pytest.mark.slow
def test_score_with_aligned_windows_has_the_bits_of_aligned_generation():
    texts = generated(alignment="window")
    found = scored([text for text, _ in texts], 4, "window")
    assert [bits(x[len(p) :]).tolist() for x, p in zip(found, PROMPTS, strict=True)] == [b.tolist() for _, b in texts]


def test_score_of_ordinary_generation_differs_somewhere():
    """The inverse control. Which batches differ depends on the device and on jax's version."""
    for batch in (3, 1, 2):
        texts = generated(deterministic=False, batch=batch)
        found = scored([text for text, _ in texts], 16)
        if any(bits(x[len(p) :]).tolist() != b.tolist() for x, p, (_, b) in zip(found, PROMPTS, texts, strict=False)):
            return
    pytest.fail("ordinary generation reported the canonical bits in every batch: the comparisons of this file show nothing")


def test_score_by_hand():
    """The model that counts up: after 5 comes 6 with log-probability -0.2428, anything else has 4 less."""
    found = score(table_model(COUNT_UP), TABLE_CFG, [[5, 6, 7], [5, 7], [9]], schedule=TABLE.schedule)
    assert [len(x) for x in found] == [3, 2, 1]
    assert all(x.dtype == np.float32 and np.isnan(x[0]) for x in found)
    np.testing.assert_allclose(found[0][1:], [TABLE_LOGPROB] * 2, rtol=1e-6)  # float32 against Python's float64
    np.testing.assert_allclose(found[1][1:], [TABLE_LOGPROB - 4], rtol=1e-6)


def test_score_of_nothing_is_nothing_and_of_bad_text_is_refused():
    assert scored([], 16) == []
    for text, message in [
        ([], "is empty"),
        ([CFG.vocab_size], "accepted are integers in 0 .. 210"),
        ([1] * 48, "max_len of 48"),
    ]:
        with pytest.raises(InputError, match=message):
            scored([[1], text], 16)


# Replay ---------------------------------------------------------------------------------------------------------------------


def replayed(state: GenState, texts: np.ndarray, length: np.ndarray, *, prefilled: bool = True):
    """Prompts prefilled or not, then the whole texts replayed, all tokens ranked."""
    return _replayed(random_model(CFG), state, texts, length, np.bool_(prefilled))


@jax.jit
def _replayed(params, state: GenState, texts: jax.Array, length: jax.Array, prefilled: jax.Array):
    schedule, live = schedule_of(4), state.live
    state = prefill(params, CFG, state.replace(live=live & prefilled), schedule=schedule)
    state = state.replace(tokens=texts, committed=length, live=live)
    return replay(params, CFG, state, schedule=schedule, top_k=CFG.vocab_size)


def given() -> tuple[GenState, np.ndarray, np.ndarray]:
    """A state of all prompts, and the generated texts without their last tokens, as arrays."""
    requests = [Request(tuple(p), s) for p, s in zip(PROMPTS, SAMPLING, strict=True)]
    state = state_of(FEW, requests)
    texts = np.zeros((3, MAX_LEN), np.int32)
    for b, (text, _) in enumerate(generated()):
        texts[b, : len(text) - 1] = text[:-1]
    return state, texts, np.asarray([len(text) - 1 for text, _ in generated()], np.int32)


@pytest.mark.parametrize("prefilled", [True, False])
def test_replay_chooses_the_recorded_tokens_and_the_next_one_with_their_bits(prefilled):
    state, texts, length = given()
    found, after = jax.device_get(replayed(state, texts, length, prefilled=prefilled))
    assert after.cache.length.tolist() == (length - 1).tolist()
    for b, (text, logprob_bits) in enumerate(generated()):
        new = slice(len(PROMPTS[b]), len(text))
        assert found.targets[b, new].tolist() == text[new]
        assert bits(found.target_logprobs[b, new]).tolist() == logprob_bits.tolist()
        assert bits(found.logprobs[b, new])[:-1].tolist() == logprob_bits[:-1].tolist()
        assert not found.logprobs[b, length[b] :].any()  # the next token was not given
        assert found.logprobs[b, 1 : new.start].any() == (not prefilled and new.start > 1)  # a prompt in the cache is not read


def test_replay_of_a_changed_token_finds_it_and_nothing_before():
    state, texts, length = given()
    at = len(PROMPTS[1]) + 5
    texts[1, at] = (texts[1, at] + 1) % CFG.vocab_size
    found, _ = jax.device_get(replayed(state, texts, length))
    differs = np.asarray(found.targets)[1] != texts[1]
    assert np.flatnonzero(differs[len(PROMPTS[1]) : length[1]])[0] == 5
    assert bits(found.logprobs)[1, at] != bits(found.target_logprobs)[1, at]


def test_reading_says_nothing_of_what_is_not_wanted_and_the_same_of_the_rest():
    """All of the first sequence is wanted, the second from its fifth new token on, nothing of the third."""
    state, texts, length = given()
    state = state.replace(tokens=jnp.asarray(texts), committed=jnp.asarray(length))
    asked = Asked(processing=True, choose=True, top_k=2)
    wanted_from = np.asarray([0, len(PROMPTS[1]) + 4, MAX_LEN + 1], np.int32)

    @jax.jit
    def run(wanted_from):
        all_given = spans(state.cache.length, state.committed, schedule_of(4))
        return read(random_model(CFG), CFG, state, all_given, schedule=schedule_of(4), asked=asked, wanted_from=wanted_from)

    whole, filled = jax.device_get(run(np.zeros(3, np.int32)))
    found, cache = jax.device_get(run(wanted_from))
    position = np.arange(MAX_LEN)[None, :]
    wanted = position >= wanted_from[:, None]
    for name in ("logprobs", "top_ids", "top_logprobs", "targets", "target_logprobs"):
        ours, theirs = (np.asarray(getattr(each, name)) for each in (found, whole))
        assert bits(ours[wanted]).tolist() == bits(theirs[wanted]).tolist()
        assert not ours[~wanted].any()
        assert theirs[~wanted].any()
    for ours, theirs in zip(jax.tree.leaves(cache.pools), jax.tree.leaves(filled.pools), strict=True):
        assert (bits(ours)[1:] == bits(theirs)[1:]).all()  # all but the scratch page


def test_replay_top_k_is_the_raw_distribution_in_order():
    """They are a distribution over all tokens; the given token is among them with the bits of its own log-probability."""
    state, texts, length = given()
    found, _ = jax.device_get(replayed(state, texts, length))
    b, at = 2, int(length[2]) - 1
    ids, logprobs = np.asarray(found.top_ids[b, at]), found.top_logprobs[b, at]
    assert sorted(ids.tolist()) == list(range(CFG.vocab_size))
    assert (np.diff(logprobs) <= 0).all()
    assert all(first < second for first, second, same in zip(ids, ids[1:], np.diff(logprobs) == 0, strict=False) if same)
    np.testing.assert_allclose(float(fixed_sum(jnp.exp(logprobs))), 1, rtol=1e-5)  # rounding of 211 float32 terms
    assert bits(logprobs)[ids.tolist().index(texts[b, at])] == bits(found.logprobs[b, at])
