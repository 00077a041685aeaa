"""The measurements of the replication on a random model with coin-flip words: what is forced, unrolled, counted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.cache import KVCache
from detspec.checkpoint.load import Model
from detspec.config import ThinkingConfig
from detspec.environment import default_schedule
from detspec.generation.loop import generate_state
from detspec.model.dense import dense_config
from detspec.model.params import init_params
from detspec.model.transformer import forward_sequences
from detspec.state import GenState, Injected
from detspec.thinking.reading import reading_of
from detspec.train.problems.tasks import Parity
from scripts.replications.thinking_states.answer_time import Setting, answer_times, settings_of
from scripts.replications.thinking_states.forced import middle, read_forced
from scripts.replications.thinking_states.prefill import SOURCES, read_by, reading_counters
from scripts.replications.thinking_states.prompts import decode, draw_problems, prompts_of, read_prompts, ready_state
from scripts.replications.thinking_states.speeds import answer_speeds
from scripts.replications.thinking_states.step_time import cut_in, random_batch
from scripts.replications.thinking_states.unrolled import forward_unrolled

THINKING = ThinkingConfig(chunk=4, in_layer=1, out_layer=2, max_thought=3, end_id=0)
CFG = dense_config(
    vocab_size=64,
    d_model=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    d_ff=32,
    dtype="float32",
    tie_embeddings=True,
    position_encoding="alibi",
    thinking=THINKING,
)
SCHEDULE = default_schedule().with_budget(16, 1)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CFG, init_params(CFG, jax.random.key(0)), tokenizer=None, eos_ids=(0,), digest="")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(Parity(), draw_problems(Parity(), num_ops=3, number=2, seed=0), "thinking")


@pytest.mark.slow
def test_forced_thought_stands_there_and_only_another_one_changes_what_is_read(model: Model, prompts: list[list[int]]):
    def start() -> GenState:
        return ready_state(model, prompts, max_tokens=1, schedule=SCHEDULE)

    def keys(state: GenState) -> np.ndarray:
        """Keys of the last layer, in the chunk behind the thought."""
        return np.asarray(keys_of_positions(state.cache, 12, 16))

    free = read_prompts(model.params, CFG, start(), schedule=SCHEDULE)
    own = reading_of(free).thoughts[:, 2]
    other = jnp.array([[5, 6, 0]] * 2, jnp.int32)
    assert (np.asarray(own) != np.asarray(other)).any(1).all()
    found = {}
    for name, given in (("own", own), ("other", other)):
        place = jnp.array([2, 2], jnp.int32)
        found[name] = read_forced(model.params, CFG, start(), place, given, schedule=SCHEDULE)
        assert (np.asarray(reading_of(found[name]).thoughts[:, 2]) == np.asarray(given)).all()
        assert (np.asarray(reading_of(found[name]).read) == np.asarray(reading_of(free).end)).all()
    assert (np.asarray(reading_of(found["own"]).thoughts) == np.asarray(reading_of(free).thoughts)).all()
    # States are compressed for another number of thoughts at once: XLA may add in another order.
    assert np.abs(keys(found["own"]) - keys(free)).max() < 1e-5
    assert np.abs(keys(found["other"]) - keys(free)).max() > 1e-2


def keys_of_positions(cache: KVCache, first: int, end: int) -> jax.Array:
    """Keys of the last layer at positions `first .. end - 1`, which lie in the first page of every row."""
    return cache.pools[-1].k[cache.page_table[:, 0]][..., first:end]


@pytest.mark.slow
def test_reading_and_decoding_apart_give_the_bits_of_generating_at_once(model: Model, prompts: list[list[int]]):
    at_once = generate_state(model.params, CFG, ready_state(model, prompts, max_tokens=3, schedule=SCHEDULE), schedule=SCHEDULE)
    read = read_prompts(model.params, CFG, ready_state(model, prompts, max_tokens=3, schedule=SCHEDULE), schedule=SCHEDULE)
    assert (np.asarray(read.committed) < np.asarray(at_once.committed)).all()
    apart = decode(model.params, CFG, read, schedule=SCHEDULE.with_budget(len(prompts), 1))
    assert (np.asarray(apart.tokens) == np.asarray(at_once.tokens)).all()
    bits = np.asarray(apart.logprobs)
    assert bits.tobytes() == np.asarray(at_once.logprobs).tobytes()
    assert (bits[0] != bits[1]).any()  # two prompts are two texts


@pytest.mark.slow
def test_every_source_reads_the_same_thoughts_and_right_ones_take_one_round(model: Model, prompts: list[list[int]]):
    recorded = None
    schedule = SCHEDULE.with_budget(16, THINKING.chunk)
    rounds = {}
    for source in SOURCES:
        state = read_by(model, prompts, source, schedule=schedule, recorded=recorded)()
        expected = reading_of(state).thoughts if recorded is None else recorded
        assert (np.asarray(reading_of(state).thoughts) == np.asarray(expected)).all()
        recorded = reading_of(state).thoughts
        rounds[source] = reading_counters(state)["rounds"]
    assert rounds["recorded"] == 1 < rounds["trivial"]


@pytest.mark.slow
def test_times_to_the_answer_are_of_both_arms_with_their_tokens_and_passes(model: Model):
    backbone = dataclasses.replace(CFG, thinking=None)
    cot = dataclasses.replace(model, cfg=backbone, params=init_params(backbone, jax.random.key(0)))
    found = answer_times(model, cot, num_ops=2, batches=(1,), repeats=1, seed=0)
    assert [tuple(one[name] for name in Setting._fields) for one in found] == settings_of(1, THINKING.chunk)
    one_chunk, two_chunks, chain = found
    assert one_chunk["passes"] >= two_chunks["passes"] >= 1
    assert one_chunk["tokens"] == two_chunks["tokens"] <= 2
    assert chain["tokens"] <= 6
    assert chain["passes"] == 0
    assert all(min(one["ms"], one["reading_ms"]) > 0 for one in found)


@pytest.mark.slow
def test_speeds_are_ratios_to_the_chain_and_count_passes_that_depend_on_each_other(model: Model):
    backbone = dataclasses.replace(CFG, thinking=None)
    chain = dataclasses.replace(model, cfg=backbone, params=init_params(backbone, jax.random.key(0)))
    found = answer_speeds(model, chain, task="arithmetic", arms=("thinking", "cot"), num_ops=2, batch=1, repeats=1, seed=0)
    thinking, cot = found
    assert cot["speedup"] == 1
    assert thinking["speedup"] == cot["ms"] / thinking["ms"]  # medians over one round
    assert thinking["dependent"] == thinking["passes"] + thinking["tokens"] > 3  # 24 tokens of a prompt in chunks of 4
    assert cot["dependent"] == 1 + cot["tokens"]


def test_middle_is_the_middle_one_of_the_places_or_none():
    assert middle(np.array([False, True, True, False, True])) == 2
    assert middle(np.zeros(3, bool)) == -1


def test_unrolled_states_are_the_streams_of_the_chunks_before(model: Model):
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 64, (2, 12)), jnp.int32)
    C = THINKING.chunk
    inject = np.zeros((2, 12, CFG.d_model), np.float32)

    @jax.jit
    def whole(inject: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        states = Injected(THINKING.in_layer, inject)
        return forward_sequences(model.params, CFG, tokens, inject=states, tap_layer=THINKING.out_layer)

    logits = []
    for _ in range(3):  # without states; then each pass over the whole makes one more chunk's states right
        found, tapped = whole(inject)
        logits.append(np.asarray(found))
        inject = np.pad(np.asarray(tapped)[:, :-C], ((0, 0), (C, 0), (0, 0)))
    plain, _, expected = logits
    found = jax.jit(forward_unrolled, static_argnums=1)(model.params, CFG, tokens)
    # The same sums over other shapes: XLA may add them in another order.
    assert np.abs(np.asarray(found) - expected).max() < 1e-4
    assert np.abs(np.asarray(found) - plain)[:, C:].max() > 1e-2


def test_rows_cut_in_more_chunks_have_as_many_tokens_of_text_and_of_thoughts():
    for number in (2, 4, 8):
        cut = cut_in(CFG, 64, 32, number)
        batch = random_batch(cut, (3, 64), number)
        assert batch.thoughts.shape == (3, number, 32 // number)
        assert (batch.thoughts[:, :-1] >= 0).all()
        assert batch.weights.shape == (3, number * cut.thinking.chunk) == (3, 64)
