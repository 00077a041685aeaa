"""Reading with thoughts: the same bits whatever was drafted, how the batch lies and what it holds; commit and rollback."""

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detspec
from detspec.checkpoint.load import Model, load
from detspec.config import ModelConfig
from detspec.draft.given import NONE
from detspec.draft.source import Drafter, draft_fn
from detspec.generation.loop import Limits, dvr_step, generate_state, run
from detspec.generation.prefill import prefill
from detspec.model.params import Params, param_shapes
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Schedule
from detspec.state import NO_TOKEN, GenState
from detspec.thinking.drafts import draft_no_thoughts, draft_thoughts
from detspec.thinking.reading import reading_of
from detspec.thinking.rider import drafted_by
from detspec.thinking.think_prompt import next_chunks, think_pass
from detspec.thinking.thoughts import thought_lists
from detspec.train.problems.chunks import align, encode
from detspec.train.problems.tasks import Parity, tokenizer_of
from tests.fakes import Request, bits, state_of
from tests.generation.one_at_a_time import poisoned
from tests.generation.test_loop import pool_copies
from tests.shelf import ALIBI_THINKER, TABLE_THINKER, THINKER, Shape
from tests.thinking.fakes import TABLE_THINKER_CFG, THINKER_CFG, random_thinker, table_thinker

pytestmark = pytest.mark.optimised

MAX_PROMPT, MAX_NEW = 34, 6
# (shape, how thoughts are drafted that a request does not bring): a fixed list, so that the number of compilations is bounded.
# The second by the CPU's kernels: on some processors XLA's products in float32 attention depend on the length of windows.
CASES = {"told": (THINKER, "none"), "self": (ALIBI_THINKER.with_numerics(implementation="cpu", linear="pinned"), "self")}
V, C, M = THINKER_CFG.vocab_size, THINKER_CFG.thinking.chunk, THINKER_CFG.thinking.max_thought
KINDS = ("right", "random", "partly right", "none")
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]

prompts = st.lists(st.integers(0, V - 1), min_size=1, max_size=MAX_PROMPT).map(tuple)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, MAX_NEW),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 2**32 - 1),
    thinking=st.sampled_from([None, None, None, False]),
)
all_requests = st.builds(Request, prompt=prompts, sampling=samplings)
# One of them is in every batch; between them they think thoughts of all kinds.
FIXED = tuple(
    Request(tuple(np.random.default_rng(seed).integers(0, V, 33).tolist()), SamplingParams(max_tokens=4)) for seed in (0, 1, 2)
)


def facts(state: GenState) -> list[tuple]:
    """Facts of each row: thoughts, states, keys and values of its positions, tokens and log-probabilities, all as bits."""
    reading, rows = reading_of(state), []
    table, length = np.asarray(state.cache.page_table), np.asarray(state.cache.length)
    pools = [np.asarray(pool).swapaxes(2, 3) for pool, _ in state.cache.pools] + [
        np.asarray(pool) for _, pool in state.cache.pools
    ]
    for b, n in enumerate(np.asarray(state.committed).tolist()):
        position = np.arange(length[b])
        page = pools[0].shape[2]
        held = [pool[table[b, position // page], :, position % page] for pool in pools]  # [length, K, H] each
        rows.append(
            (
                np.asarray(reading.thoughts)[b, : int(reading.end[b])].tolist(),
                bits(reading.states[b]).tobytes(),
                b"".join(bits(x).tobytes() for x in held),
                np.asarray(state.tokens)[b, :n].tolist(),
                bits(state.logprobs)[b, :n].tolist(),
            )
        )
    return rows


@partial(jax.jit, static_argnames=("cfg", "schedule"))
def read_one_chunk(params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule) -> GenState:
    """A pass that holds one chunk of each row, and so speculates on nothing."""
    reading = reading_of(state)
    alone = reading.replace(end=jnp.minimum(reading.read + 1, reading.end))
    state = think_pass(params, cfg, state.having(thoughts=alone), schedule=schedule)
    return state.having(thoughts=reading_of(state).replace(end=reading.end))


@partial(jax.jit, static_argnames=("cfg", "schedule"))
def answer_token_by_token(params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule) -> GenState:
    """The rest of `generate_state` once everything is read: half of what there is to compile."""
    state = prefill(params, cfg, state, schedule=schedule)
    no_draft = draft_fn(Drafter(NONE), schedule)

    def step(state: GenState) -> GenState:
        return dvr_step(params, cfg, state, draft_fn=no_draft, schedule=schedule)[0]

    return run(state, step, limits=Limits(THINKER.length))[0]


def start(shape: Shape, requests: Sequence[Request], thoughts=None) -> GenState:
    """`state_of`, for programs without the processing of logits, for which no request here asks."""
    return state_of(shape, requests, thoughts).with_processing(False)


def read_by_chunks(shape: Shape, request: Request, change_at: int | None = None) -> tuple[GenState, Counter]:
    """Reads alone, chunk by chunk: the state, and how many thoughts are of which kind.

    The states of the thought after chunk `change_at` are replaced by others.
    """
    cfg = shape.cfg
    params, state, kinds = random_thinker(cfg), start(shape.alone, [request]), Counter()
    for chunk in range(int(reading_of(state).end[0])):
        state = read_one_chunk(params, cfg, state, shape.alone.schedule)
        kinds[kind_of(reading_of(state).thoughts[0, chunk].tolist())] += 1
        if chunk == change_at:
            state = state.having(thoughts=reading_of(state).replace(states=reading_of(state).states + 1))
    return state, kinds


def sequentially(shape: Shape, request: Request, change_at: int | None = None) -> tuple[tuple, Counter]:
    """The reference: what there is when `read_by_chunks` is followed by one token at a time; and its kinds of thoughts."""
    state, kinds = read_by_chunks(shape, request, change_at)
    return facts(answer_token_by_token(random_thinker(shape.cfg), shape.cfg, state, shape.alone.schedule))[0], kinds


reference = cache(sequentially)


def kind_of(thought: list[int]) -> str:
    if thought[0] == 0:
        return "trivial"
    return "cut" if 0 not in thought else "long" if thought.index(0) > 1 else "short"


def drafts_of(kind: str, thoughts: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
    """Drafts of the true `thoughts`: right, random, each of them right or with one token more or less or another one, none."""
    right = thought_lists(np.asarray(thoughts, np.int32).reshape(-1, M))
    if kind == "none":
        return []
    if kind == "random":
        return [rng.integers(0, V, rng.integers(1, M + 1)).tolist() for _ in right]
    if kind == "right":
        return right
    changes = (
        lambda t: t,
        lambda t: t[:-1] or [5],
        lambda t: [*t, 7][-M:],
        lambda t: [*t[:-1], (t[-1] + 3) % V],
        lambda t: [(t[0] + 1) % V, *t[1:]],
    )
    return [changes[rng.integers(len(changes))](thought) for thought in right]


def scattered(state: GenState, rng: np.random.Generator) -> GenState:
    """Pages handed out in another order, large numbers left in every slot."""
    table = 1 + rng.permutation(state.cache.page_table.size).reshape(state.cache.page_table.shape).astype(np.int32)
    return state.replace(cache=state.cache.replace(page_table=jnp.asarray(table), pools=poisoned(state.cache.pools, rng)))


@pytest.mark.parametrize("name", CASES)
def test_speculative_reading_for_any_drafts_neighbours_and_places_equals_reading_chunk_by_chunk(name):
    shape, source = CASES[name]
    cfg = shape.cfg
    seen: Counter = Counter()

    @hypothesis.settings(max_examples=4, phases=PHASES)
    @hypothesis.given(data=st.data())
    def check(data: st.DataObject) -> None:
        requests = [data.draw(st.sampled_from(FIXED)), *(data.draw(all_requests) for _ in range(shape.batch - 1))]
        requests = data.draw(st.permutations(requests))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        expected = [reference(shape, request) for request in requests]
        thoughts = [drafts_of(rng.choice(KINDS), row[0], rng) for row, _ in expected]
        state = scattered(start(shape, requests, thoughts), rng)
        state = generate_state(random_thinker(cfg), cfg, drafted_by(state, source), schedule=shape.schedule)
        assert (reading_of(state).read == reading_of(state).end).all()
        for b, got in enumerate(facts(state)):
            assert got == expected[b][0], f"row {b} of {requests}"
        seen["accepted"] += int(state.counters.num_accepted_thoughts.sum())
        seen["rejected"] += int(state.counters.num_rejected_thoughts.sum())

    check()
    assert seen["accepted"]
    assert seen["rejected"] or source == "self"  # what was drafted by reading ahead may all be right
    kinds = sum((reference(shape, request)[1] for request in FIXED), Counter())
    assert all(kinds[kind] for kind in ("trivial", "short", "long", "cut")), kinds


def test_other_states_after_one_thought_change_what_follows_and_nothing_before():
    request = Request(tuple(range(3, 3 + 22)), SamplingParams(max_tokens=3))
    (thoughts, *rest), _ = reference(THINKER, request)
    (changed, *others), _ = sequentially(THINKER, request, change_at=2)
    assert changed[:3] == thoughts[:3]
    assert all(one != other for one, other in zip(rest[1:2] + rest[3:], others[1:2] + others[3:], strict=True))


@pytest.mark.slow
def test_keys_and_values_of_the_cheap_pass_are_not_those_that_are_committed():
    """In float32, because rounding to bfloat16 hides the difference."""
    cfg, read_ahead = ALIBI_THINKER.cfg, jax.jit(draft_thoughts, static_argnums=(1, 3))
    requests = FIXED[:2]
    drafted = read_ahead(random_thinker(cfg), cfg, start(ALIBI_THINKER, requests), ALIBI_THINKER.schedule)
    assert not np.asarray(reading_of(drafted).read).any()
    assert not np.asarray(reading_of(drafted).states).any()
    assert not np.asarray(drafted.cache.length).any()
    unverified = facts(drafted.replace(cache=drafted.cache.replace(length=np.full(2, 32, np.int32))))
    committed = [facts(read_by_chunks(ALIBI_THINKER, request)[0])[0] for request in requests]
    assert [len(row[2]) for row in unverified] == [len(row[2]) for row in committed]
    assert [row[2] for row in unverified] != [row[2] for row in committed]


def test_read_pass_of_known_thoughts_commits_up_to_the_first_wrong_draft():
    """C = 4, M = 3, four windows. Row 0 thinks [5 6 0], [0], [3 3 3]; row 1 [0]; prompts of 4 and 1 tokens have no thought."""
    prompts = [2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 2, 3, 9], [9, 9, 9, 9, 9], [9, 9, 9, 9], [9]
    requests = [Request(tuple(prompt), SamplingParams(max_tokens=1)) for prompt in prompts]
    state = state_of(TABLE_THINKER, requests)
    assert reading_of(state).end.tolist() == [3, 1, 0, 0]
    params, cfg = table_thinker(), TABLE_THINKER_CFG
    step = jax.jit(partial(think_pass, schedule=TABLE_THINKER.schedule), static_argnums=1)
    next_four = jax.jit(partial(next_chunks, groups=4))

    chunks = next_four(state)
    assert chunks.windows.sequence.tolist() == [0, 1, 0, 0]
    assert chunks.depth.tolist() == [0, 0, 1, 2]
    assert chunks.windows.tokens[2].tolist() == [2, 2, 2, 2]
    state = step(params, cfg, state)  # row 0: a wrong draft at once; row 1: a right one
    assert thought_lists(np.asarray(reading_of(state).thoughts)[0])[:3] == [[5, 6, 0], [0], [0]]
    expect(state, read=[1, 1, 0, 0], passes=[1, 1, 0, 0], drafts=[1, 1, 0, 0], accepted=[0, 1, 0, 0], rejected=[1, 0, 0, 0])
    states = np.asarray(reading_of(state).states)
    assert states[0].argmax(-1).tolist() == [5, 6, 0, 0]
    assert (states[0].sum(-1) == 1).all()
    assert (states[1:] == 0).all()

    chunks = next_four(state)
    assert chunks.windows.sequence.tolist() == [0, 0, -1, -1]
    assert chunks.windows.start.tolist() == [4, 8, 0, 0]
    state = step(params, cfg, state)  # a right draft, then a wrong one
    assert thought_lists(np.asarray(reading_of(state).thoughts)[0])[:3] == [[5, 6, 0], [0], [3, 3, 3]]
    expect(state, read=[3, 1, 0, 0], passes=[2, 1, 0, 0], drafts=[3, 1, 0, 0], accepted=[1, 1, 0, 0], rejected=[2, 0, 0, 0])
    assert np.asarray(reading_of(state).states)[0].argmax(-1).tolist() == [3, 3, 0, 0]
    assert (np.asarray(reading_of(state).thoughts)[0, 3:, 1:] == NO_TOKEN).all()


COUNTERS = {
    "passes": "num_read_passes",
    "drafts": "num_draft_thoughts",
    "accepted": "num_accepted_thoughts",
    "rejected": "num_rejected_thoughts",
}


def expect(state: GenState, *, read: list[int], **counters: list[int]) -> None:
    assert reading_of(state).read.tolist() == read
    assert state.cache.length.tolist() == [4 * n for n in read]
    assert {name: getattr(state.counters, COUNTERS[name]).tolist() for name in counters} == counters


@pytest.fixture(scope="module")
def parity() -> Model:
    """The trained model that comes with the package."""
    return load(Path(detspec.__file__).parent / "assets" / "thinking_parity")


@pytest.mark.slow
def test_trained_model_takes_a_round_more_than_there_are_thoughts_and_one_if_all_are_known(parity: Model):
    rng, task = np.random.default_rng(0), Parity(filler=0.5)
    shape = Shape(parity.cfg, Schedule(budget=Budget(128, 1)), batch=3, length=128)  # prompts are long
    encoded = encode([task.draw(rng, n) for n in (10, 3, 8)], tokenizer_of(task), "thinking")
    true = [align(one, parity.cfg.thinking) for one in encoded]
    requests = [Request(tuple(one.prompt), SamplingParams(max_tokens=2)) for one in encoded]
    plain, told = (
        generate_state(parity.params, parity.cfg, start(shape, requests, thoughts), schedule=shape.schedule)
        for thoughts in (None, true)
    )
    plain, told = jax.device_get((plain, told))
    for b, thoughts in enumerate(true):
        assert thought_lists(reading_of(plain).thoughts[b])[: len(thoughts)] == thoughts
        assert plain.tokens[b, len(encoded[b].prompt) :][:2].tolist() == encoded[b].continuation
        assert plain.counters.num_rejected_thoughts[b] == sum(len(thought) > 1 for thought in thoughts) > 0
    assert told.counters.num_rejected_thoughts.tolist() == [0, 0, 0]
    assert told.counters.num_accepted_thoughts.tolist() == [len(thoughts) for thoughts in true]
    assert (bits(told.logprobs) == bits(plain.logprobs)).all()


def test_trivial_drafts_leave_committed_thoughts():
    requests = [Request((2, 2, 2, 1, 2, 2, 2, 2, 9), SamplingParams(max_tokens=1))]
    told = [[[5, 6, 0], [7, 7, 7]]]
    state = state_of(TABLE_THINKER, requests, told)
    state = state.having(thoughts=reading_of(state).replace(read=np.ones(1, np.int32)))
    drafted = draft_no_thoughts(table_thinker(), TABLE_THINKER_CFG, state, TABLE_THINKER.schedule)
    assert thought_lists(np.asarray(reading_of(drafted).thoughts)[0]) == [[5, 6, 0], [0], [0], [0]]


def test_reading_and_generating_copies_no_page_pool():
    """The program that the test of "told" runs, which is compiled once."""
    shapes = jax.eval_shape(lambda: start(THINKER, []))
    lowered = generate_state.lower(param_shapes(THINKER.cfg), THINKER.cfg, shapes, schedule=THINKER.schedule)
    program = lowered.compile()
    assert pool_copies(program, shapes) == []
