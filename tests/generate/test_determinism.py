"""The contract: committed tokens and the bits of their log-probabilities do not depend on how, where or beside whom.

The reference of every comparison is the plainest way to generate: nobody else in the batch, one token per window, no draft.
"""

import dataclasses
import itertools
from collections import Counter
from functools import cache, partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.config import ModelConfig, Schedule
from detspec.generate.insert import insert, pack_requests
from detspec.generate.loop import dvr_step, run
from detspec.generate.prefill import prefill
from detspec.sampling import SamplingParams
from detspec.state import LENGTH, STOP, GenState
from tests.fakes import FAMILY_CFGS, RANDOM_CFG, Request, bits, draft_source, random_model, state_of

MAX_LEN = 48
MAX_PROMPT, MAX_NEW = 20, 24
PAGE = 16
BF16, F32 = RANDOM_CFG, dataclasses.replace(RANDOM_CFG, dtype="float32")
V = RANDOM_CFG.vocab_size

# (model, rows, window, batch, draft source): few rows and many, one-row windows and windows of a page, more and fewer requests
# than windows in a pass. A fixed list, so that the number of compilations is bounded.
CASES = (
    (BF16, 16, 4, 3, "ordinary"),
    (BF16, 16, 4, 3, "self"),
    (BF16, 16, 16, 2, "ordinary"),
    (BF16, 64, 1, 3, "none"),
    (BF16, 64, 8, 1, "ordinary"),
    (BF16, 64, 16, 8, "ordinary"),
    (F32, 64, 8, 4, "ordinary"),
    (F32, 64, 8, 4, "self"),
)
ALIGNED_CASES = ((BF16, 16, 4, 3, "ordinary"), (F32, 64, 8, 4, "ordinary"), (F32, 64, 8, 4, "self"))
# All but `explain`: it runs a failing example some hundred times more.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
DRAFTS = ("perfect", "wrong", "random", "partly right", "empty")


@partial(jax.jit, static_argnames=("cfg", "schedule", "source"), donate_argnames=("state",))
def generate(params, cfg, state, recorded, recorded_length, num_steps, *, schedule: Schedule, source: str) -> GenState:
    """Prefills what is missing and runs up to `num_steps` steps."""
    state = prefill(params, cfg, state, schedule=schedule)
    draft_fn = draft_source(source, schedule, recorded, recorded_length)
    step_fn = partial(dvr_step, params, cfg, draft_fn=draft_fn, schedule=schedule)
    return run(state, step_fn, max_steps=num_steps, min_live=jnp.int32(1))[0]


def results(state: GenState) -> list[tuple]:
    """Of each row: committed tokens, the bits of their log-probabilities, why it ended."""
    tokens, logprobs, committed, finish = jax.device_get((state.tokens, state.logprobs, state.committed, state.finish))
    return [
        (tuple(tokens[b, :n].tolist()), tuple(bits(logprobs[b, :n]).tolist()), int(finish[b])) for b, n in enumerate(committed)
    ]


def make_schedule(rows: int, window: int, alignment: str = "free") -> Schedule:
    return Schedule(rows=rows, window=window, page=PAGE, alignment=alignment)


def generate_all(
    requests, *, schedule: Schedule, source: str, cfg=BF16, recorded=None, recorded_length=None, spoil=lambda state: state
) -> GenState:
    """The final state of `requests`, whose cache `spoil` may change before the start."""
    B = len(requests)
    recorded = np.zeros((B, MAX_LEN), np.int32) if recorded is None else recorded
    recorded_length = np.zeros(B, np.int32) if recorded_length is None else recorded_length
    state = spoil(state_of(cfg, requests, schedule=schedule, max_len=MAX_LEN))
    steps = np.int32(MAX_LEN)
    return generate(random_model(cfg), cfg, state, recorded, recorded_length, steps, schedule=schedule, source=source)


@cache
def one_at_a_time(request: Request, rows: int = 64, cfg: ModelConfig = BF16, aligned_window: int | None = None) -> tuple:
    """The reference. Aligned bits depend on the window, so there only the draft and the neighbours are taken away."""
    schedule = make_schedule(rows, 1) if aligned_window is None else make_schedule(rows, aligned_window, "window")
    return results(generate_all([request], schedule=schedule, source="recorded", cfg=cfg))[0]


def guesses(kind: str, request: Request, answer: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """What a draft source of that kind believes the text of `request` to be: `[MAX_LEN]` tokens and how many are in use."""
    told = np.zeros(MAX_LEN, np.int32)
    told[: len(answer)] = answer
    if kind == "perfect":
        return told, len(answer)
    if kind == "empty":
        return told, 0
    if kind == "wrong":
        return (told + 1) % V, MAX_LEN
    if kind == "random":
        return rng.integers(0, V, MAX_LEN, dtype=np.int32), MAX_LEN
    flipped = rng.random(MAX_LEN) < 0.3
    flipped[: len(request.prompt)] = False
    return np.where(flipped, (told + 7) % V, told), int(rng.integers(len(request.prompt), MAX_LEN + 1))


def scatter_and_poison(state: GenState, rng: np.random.Generator, poison: bool) -> GenState:
    """Hands the pages out in another order, and leaves large numbers in every slot."""
    pages = state.cache.page_table.size
    table = 1 + rng.permutation(pages).reshape(state.cache.page_table.shape).astype(np.int32)
    cache = state.cache.replace(page_table=jnp.asarray(table))
    if poison:
        cache = cache.replace(**{name: poisoned(getattr(cache, name), rng) for name in ("k", "v")})
    return state.replace(cache=cache)


def poisoned(pools: tuple[jax.Array, ...], rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Finite numbers of both signs and all sizes up to 1e30."""
    magnitude = rng.uniform(-3, 30, pools[0].shape)
    noise = (rng.choice([-1.0, 1.0], pools[0].shape) * 10.0**magnitude).astype(np.float32)
    return tuple(jnp.asarray(noise).astype(pool.dtype) for pool in pools)


# What reads the text before each choice, so that it must not see a refused guess.
PROCESSING = (
    {},
    {},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.7, "presence_penalty": -0.3, "min_tokens": 6},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.9, "logit_bias": {9: 4.0, 18: 3.5, V - 1: -2.0}},
)


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


def check_theorem(data: st.DataObject, case: tuple[ModelConfig, int, int, int, str], alignment: str, seen: Counter) -> None:
    """One batch of `case`'s shape, all else drawn: every deterministic row equals its reference."""
    cfg, rows, window, batch, source = case
    schedule = make_schedule(rows, window, alignment)
    # The first row is long, deterministic and badly guessed, so that every example shows something.
    requests = [data.draw(long_requests), *data.draw(st.lists(all_requests, min_size=batch - 1, max_size=batch - 1))]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    poison = data.draw(st.booleans())
    expected = [one_at_a_time(r, rows, cfg, window if alignment == "window" else None) for r in requests]
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
        recorded=recorded,
        recorded_length=recorded_length,
        spoil=lambda state: scatter_and_poison(state, rng, poison),
    )
    assert not state.live.any()
    assert (state.cache.length == state.committed - 1).all()
    for b, (request, got) in enumerate(zip(requests, results(state), strict=True)):
        if request.sampling.deterministic:
            assert got == expected[b], f"row {b}, draft {kinds[b]}, {request}"
            seen["rollbacks"] += int(state.counters.num_rollbacks[b])
            seen["accepted"] += int(state.counters.num_accepted_draft_tokens[b])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_committed_bits_for_any_draft_neighbours_and_places_equal_one_token_at_a_time(case):
    seen: Counter = Counter()

    @hypothesis.settings(max_examples=10, phases=PHASES)
    @hypothesis.given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_theorem(data, case, "free", seen)

    check()
    if case[-1] == "ordinary":  # else the comparison would have shown little
        assert seen["rollbacks"] >= 1
        assert seen["accepted"] >= 1


@pytest.mark.parametrize("family", FAMILY_CFGS)
def test_committed_bits_of_every_family_equal_one_token_at_a_time(family):
    """Sliding windows, soft caps, biases, norms of heads and rotary scalings, all of which the texts run past."""
    seen: Counter = Counter()

    @hypothesis.settings(max_examples=6, phases=PHASES)
    @hypothesis.given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_theorem(data, (FAMILY_CFGS[family], 16, 4, 3, "ordinary"), "free", seen)

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
    if case[-1] == "ordinary":
        assert seen["rollbacks"] >= 1
        assert seen["accepted"] >= 1


FIXED = tuple(
    Request(tuple(np.random.default_rng(i).integers(0, V, 1 + 3 * i).tolist()), SamplingParams(max_tokens=MAX_NEW, **extra))
    for i, extra in enumerate(
        [
            {},
            {"temperature": 0.7, "seed": 3},
            {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 4},
            {},
            {"temperature": 1.0, "top_k": 1, "seed": 5},
        ]
    )
)


CROWD = [Request(r.prompt, dataclasses.replace(r.sampling, max_tokens=8)) for r in FIXED]


def first_of_a_crowd(cfg: ModelConfig, batch: int, *, deterministic: bool) -> tuple:
    """The result of `CROWD[0]` with `batch - 1` others beside it."""
    crowd = [Request(r.prompt, dataclasses.replace(r.sampling, deterministic=deterministic)) for r in CROWD]
    crowd = list(itertools.islice(itertools.cycle(crowd), batch))
    return results(generate_all(crowd, schedule=make_schedule(64, 4), source="self", cfg=cfg))[0]


def test_references_hold_varied_texts():
    """A model that repeats itself would agree with everything."""
    texts = [one_at_a_time(request)[0] for request in FIXED]
    new = [text[len(request.prompt) :] for text, request in zip(texts, FIXED, strict=True)]
    assert [len(tokens) for tokens in new] == [MAX_NEW] * len(FIXED)
    assert min(len(set(tokens)) for tokens in new) >= MAX_NEW // 3
    assert len({token for tokens in new for token in tokens}) >= 50
    assert len(set(new)) == len(new)


@pytest.mark.parametrize("kind", ["perfect", "wrong", "empty"])
def test_draft_of_known_quality_changes_the_counters_and_no_bit(kind):
    """24 new tokens in windows of 8: three passes of 8 if every guess is right, 24 passes if none is or there is none."""
    rng = np.random.default_rng(0)
    expected = [one_at_a_time(request) for request in FIXED]
    told = [guesses(kind, request, answer[0], rng) for request, answer in zip(FIXED, expected, strict=True)]
    state = generate_all(
        FIXED,
        schedule=make_schedule(64, 8),
        source="ordinary",
        recorded=np.stack([tokens for tokens, _ in told]),
        recorded_length=np.asarray([length for _, length in told], np.int32),
    )
    assert results(state) == expected
    B = len(FIXED)
    passes, accepted, rollbacks = {"perfect": (3, 21, 0), "wrong": (24, 0, 23), "empty": (24, 0, 0)}[kind]
    assert state.counters.num_verify_passes.tolist() == [passes] * B
    assert state.counters.num_accepted_draft_tokens.tolist() == [accepted] * B
    assert state.counters.num_rollbacks.tolist() == [rollbacks] * B  # the last pass has no room for a guess


def test_neighbours_that_stop_early_or_are_ordinary_change_no_bit():
    """Some 24 of 211 tokens stop the second and third row; the fourth and fifth commit their guesses unverified."""
    stops = tuple(range(0, V, 9))
    requests = [FIXED[0], *(Request(r.prompt, dataclasses.replace(r.sampling, stop_token_ids=stops)) for r in FIXED[1:3])]
    ordinary = [Request(r.prompt, dataclasses.replace(r.sampling, deterministic=False)) for r in FIXED[3:]]
    expected = [one_at_a_time(request) for request in requests]
    assert [finish for _, _, finish in expected] == [LENGTH, STOP, STOP]
    told = [guesses("partly right", r, one_at_a_time(r)[0], np.random.default_rng(0)) for r in (*requests, *ordinary)]
    state = generate_all(
        [*requests, *ordinary],
        schedule=make_schedule(64, 8),
        source="ordinary",
        recorded=np.stack([tokens for tokens, _ in told]),
        recorded_length=np.full(5, MAX_LEN, np.int32),
    )
    found = results(state)
    assert found[:3] == expected
    assert found[3:] != [one_at_a_time(request) for request in FIXED[3:]]  # wrong guesses went in as they were
    assert state.counters.num_verify_passes[3:].tolist() == [1, 1]  # the very last token has no guess, so it was verified


def test_row_order_permuted_with_its_requests_permutes_the_results():
    recorded = np.stack(
        [guesses("partly right", r, one_at_a_time(r)[0], np.random.default_rng(i))[0] for i, r in enumerate(FIXED)]
    )
    lengths = np.full(len(FIXED), MAX_LEN, np.int32)
    schedule = make_schedule(64, 8)
    straight = results(generate_all(FIXED, schedule=schedule, source="ordinary", recorded=recorded, recorded_length=lengths))
    order = [3, 0, 4, 2, 1]
    permuted = generate_all(
        [FIXED[i] for i in order], schedule=schedule, source="ordinary", recorded=recorded[order], recorded_length=lengths
    )
    assert results(permuted) == [straight[i] for i in order]
    assert len(set(straight)) == len(straight)  # else any order would do


# Requests that were taken out half way ---------------------------------------------------------------------------------------

PENALISED = [
    Request(r.prompt, dataclasses.replace(r.sampling, **processing))
    for r, processing in zip(FIXED, itertools.islice(itertools.cycle(PROCESSING[2:]), len(FIXED)), strict=True)
]


def test_request_put_in_again_with_its_new_tokens_goes_on_with_the_same_bits():
    """Two steps, then prompts and new tokens put into a fresh state, which runs to the end."""
    schedule = make_schedule(64, 4)
    expected = [one_at_a_time(request) for request in PENALISED]
    told = [guesses("partly right", r, one_at_a_time(r)[0], np.random.default_rng(i)) for i, r in enumerate(PENALISED)]
    recorded = np.stack([tokens for tokens, _ in told])
    lengths = np.full(len(PENALISED), MAX_LEN, np.int32)

    def steps(state: GenState, number: int) -> GenState:
        steps = np.int32(number)
        return generate(random_model(BF16), BF16, state, recorded, lengths, steps, schedule=schedule, source="ordinary")

    state = steps(state_of(BF16, PENALISED, schedule=schedule, max_len=MAX_LEN), 2)
    assert state.live.all()
    tokens, logprobs, committed = jax.device_get((state.tokens, state.logprobs, state.committed))
    prompt_lens = [len(request.prompt) for request in PENALISED]
    fresh = state_of(BF16, FIXED, schedule=schedule, max_len=MAX_LEN)
    requests = pack_requests(
        fresh,
        range(len(PENALISED)),
        [row[:n].tolist() for row, n in zip(tokens, committed, strict=True)],
        [request.sampling for request in PENALISED],
        eos_ids=(),
        prompt_lens=prompt_lens,
        logprobs=[row[start:n].tolist() for row, start, n in zip(logprobs, prompt_lens, committed, strict=True)],
    )
    state = insert(fresh, requests)
    assert results(steps(state, MAX_LEN)) == expected
    # The penalties did something; that they would do another thing without `prompt_lens` is shown in test_processing.py.
    assert all(answer[0] != one_at_a_time(plain)[0] for answer, plain in zip(expected, FIXED, strict=True))


# Inverse control ------------------------------------------------------------------------------------------------------------


def test_deterministic_row_in_a_crowd_keeps_its_bits():
    assert first_of_a_crowd(F32, 64, deterministic=True) == one_at_a_time(CROWD[0], cfg=F32)


def test_ordinary_row_in_crowds_of_other_sizes_gets_other_bits():
    """What verification is for. Which sizes and dtypes differ depends on the device and on jax's version."""
    for cfg in (F32, BF16):
        alone = first_of_a_crowd(cfg, 1, deterministic=False)
        for batch in (64, 16, 2):
            if first_of_a_crowd(cfg, batch, deterministic=False)[1] != alone[1]:
                return
    pytest.fail("the ordinary path gave equal bits in every batch: the comparisons of this file show nothing here")


# What a device certifies ----------------------------------------------------------------------------------------------------


def test_row_budgets_on_this_cpu_give_equal_bits():
    """Not promised: bits may depend on the number of rows of a pass. CPUs have given equal bits so far; should one not, then
    its certified set of budgets is smaller, and this test states which."""
    requests = [Request(FIXED[i].prompt, dataclasses.replace(FIXED[i].sampling, max_tokens=8)) for i in (1, 3)]
    cfg = dataclasses.replace(BF16, num_layers=1)
    found = {
        rows: results(generate_all(requests, schedule=make_schedule(rows, min(rows, 4)), source="recorded", cfg=cfg))
        for rows in (1, 4, 16, 64, 128)
    }
    assert {rows: answer == found[64] for rows, answer in found.items()} == dict.fromkeys(found, True)


# Replay ---------------------------------------------------------------------------------------------------------------------


def replayed(*, after_steps: int, drop: bool, refill: bool) -> list[tuple]:
    """FIXED generated in two parts, between which the pages are spoilt; `refill` lets prefill write them again."""
    schedule = make_schedule(64, 4)
    B = len(FIXED)
    told = [guesses("partly right", r, one_at_a_time(r)[0], np.random.default_rng(i)) for i, r in enumerate(FIXED)]
    recorded = np.stack([tokens for tokens, _ in told])
    lengths = np.full(B, MAX_LEN, np.int32)
    state = state_of(BF16, FIXED, schedule=schedule, max_len=MAX_LEN)
    state = generate(
        random_model(BF16), BF16, state, recorded, lengths, np.int32(after_steps), schedule=schedule, source="ordinary"
    )
    assert state.live.all()
    if drop:
        rng = np.random.default_rng(1)
        cache = state.cache.replace(**{name: poisoned(getattr(state.cache, name), rng) for name in ("k", "v")})
        if refill:
            cache = cache.replace(length=jnp.zeros_like(cache.length))
        state = state.replace(cache=cache)
    state = generate(
        random_model(BF16), BF16, state, recorded, lengths, np.int32(MAX_LEN), schedule=schedule, source="ordinary"
    )
    return results(state)


@pytest.mark.parametrize("after_steps", [0, 1, 4])
def test_replay_after_a_dropped_cache_changes_nothing(after_steps):
    assert replayed(after_steps=after_steps, drop=True, refill=True) == [one_at_a_time(request) for request in FIXED]


def test_replay_without_refilling_a_spoilt_cache_changes_the_text():
    spoilt = replayed(after_steps=4, drop=True, refill=False)
    assert spoilt != [one_at_a_time(request) for request in FIXED]
