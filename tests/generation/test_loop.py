"""The loop as a program: traced once, its cache updated in place, little memory besides weights and cache."""

import re
from functools import cache, partial

import jax
import numpy as np
import pytest

from detspec.cache import cache_bytes
from detspec.draft.source import Drafter, draft_fn
from detspec.errors import InputError
from detspec.generation.init import init_state, start_state
from detspec.generation.loop import Limits, default_source, dvr_step, generate, generate_state, run
from detspec.generation.prefill import prefill
from detspec.model.params import param_shapes, params_bytes
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Schedule
from detspec.state import LENGTH, STOP
from tests.fakes import SOURCES, TABLE_CFG, Request, state_of, table_model
from tests.shelf import FEW, LARGE, TABLE, Shape


def random_requests(batch: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            tuple(rng.integers(0, TABLE_CFG.vocab_size, rng.integers(1, 12)).tolist()),
            SamplingParams(max_tokens=int(rng.integers(1, 12)), temperature=float(b % 2), seed=seed, stop_token_ids=(seed, b)),
        )
        for b in range(batch)
    ]


def test_program_is_traced_once_for_all_prompts_rollbacks_and_endings():
    traced = []

    @partial(jax.jit, static_argnames=("schedule",), donate_argnames=("state",))
    def counted(params, state, recorded, recorded_length, *, schedule):
        traced.append(state.tokens.shape[0])
        state = prefill(params, TABLE_CFG, state, schedule=schedule)
        told = draft_fn(Drafter(SOURCES["recorded"], (recorded, recorded_length)), schedule)

        def step(state):
            return dvr_step(params, TABLE_CFG, state, draft_fn=told, schedule=schedule)[0]

        return run(state, step, limits=Limits(TABLE.length))[0]

    def arguments(batch, seed):
        state = state_of(TABLE._replace(batch=batch), random_requests(batch, seed)).with_processing(False)
        recorded = np.random.default_rng(seed).integers(0, TABLE_CFG.vocab_size, (batch, TABLE.length), dtype=np.int32)
        return table_model(), state, recorded, np.full(batch, TABLE.length, np.int32)

    states = [counted(*arguments(TABLE.batch, seed), schedule=TABLE.schedule) for seed in range(4)]
    assert sum(int(np.asarray(state.counters.num_rollbacks).sum()) for state in states) > 4
    assert len({int(n) for state in states for n in np.asarray(state.committed)}) > 4
    assert traced == [TABLE.batch]
    counted.trace(*arguments(2, 0), schedule=TABLE.schedule)  # another number of rows is another program
    assert traced == [TABLE.batch, 2]


def generate_by_table(prompts, sampling):
    """The text of each of two rows, the longest one of four pages, so that it is compiled once. Token 12 ends a text."""
    state = generate(table_model(), TABLE_CFG, prompts, sampling, eos_ids=[12], schedule=TABLE.schedule)
    texts = [tokens[:n] for tokens, n in zip(state.tokens.tolist(), state.committed.tolist(), strict=True)]
    return texts, state.finish.tolist()


def test_generate_with_new_prompts_of_the_same_shape_compiles_nothing():
    def run_with(seed):
        rng = np.random.default_rng(seed)
        generate_by_table([rng.integers(0, 16, n).tolist() for n in rng.integers(9, 13, 2)], SamplingParams(max_tokens=4))
        return generate_state.plain._cache_size()

    assert run_with(0) == run_with(1) == run_with(2)


@cache
def compiled_loop(shape: Shape, *, processing: bool = True, keep_old_cache: bool = False):
    """The compiled program of prefill and loop with a donated state, and the state's shapes."""
    cfg, schedule = shape.cfg, shape.schedule

    def program(params, state):
        old = state.cache
        state = prefill(params, cfg, state, schedule=schedule)
        own = draft_fn(Drafter(default_source(schedule)), schedule)

        def step(state):
            return dvr_step(params, cfg, state, draft_fn=own, schedule=schedule)[0]

        state, _ = run(state, step, limits=Limits(shape.length))
        return (state, old.pools) if keep_old_cache else state

    shapes = jax.eval_shape(lambda: state_of(shape, []).with_processing(processing))
    return jax.jit(program, donate_argnums=1).lower(param_shapes(cfg), shapes).compile(), shapes


def of_window(shape: Shape, window: int) -> Shape:
    return shape._replace(schedule=shape.schedule.with_budget(shape.schedule.budget.rows, window))


def pool_copies(compiled, shapes) -> list[str]:
    """Copy instructions of the optimised HLO whose result is as large as a page pool."""
    pools = {",".join(str(size) for size in pool.shape) for pool in jax.tree.leaves(shapes.cache.pools)}
    copy = re.compile(rf"= \(?\w+\[({'|'.join(pools)})\].*\bcopy(-start)?\(")
    return [line.strip() for line in compiled.as_text().splitlines() if copy.search(line)]


@pytest.mark.parametrize(
    "asked",
    [
        {"shape": of_window(FEW, 1), "processing": False},
        {"shape": of_window(FEW, 1).with_numerics(cache_dtype="int8", implementation="cpu"), "processing": False},
        {"shape": of_window(LARGE, 16)},
    ],
    ids=["1", "1, int8", "16"],
)
def test_loop_copies_no_page_pool(asked):
    compiled, shapes = compiled_loop(**asked)
    assert pool_copies(compiled, shapes) == []
    pools = jax.tree.leaves(shapes.cache.pools)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(pool.size * pool.dtype.itemsize for pool in pools)


def test_loop_that_keeps_its_old_cache_does_copy_page_pools():
    compiled, shapes = compiled_loop(of_window(FEW, 1), processing=False, keep_old_cache=True)
    assert len(pool_copies(compiled, shapes)) >= 2 * FEW.cfg.num_layers


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_generation_needs_a_quarter_more_memory_than_weights_and_cache_at_most(window):
    """Arguments, temporaries and what of the result is not aliased; CPU peaks leave out temporaries."""
    compiled, _ = compiled_loop(of_window(LARGE, window))
    memory = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    needed += memory.output_size_in_bytes - memory.alias_size_in_bytes
    numerics = LARGE.schedule.numerics
    held = params_bytes(param_shapes(LARGE.cfg))
    held += cache_bytes(LARGE.cfg, max_requests=LARGE.batch, max_len=LARGE.length, numerics=numerics)
    assert needed > held  # the analysis counts what it must
    assert needed <= 1.25 * held, f"{needed / held:.3f} x; temporaries {memory.temp_size_in_bytes / 1e6:.2f} MB"


def test_generate_runs_prompts_of_several_lengths_to_their_ends():
    texts, finish = generate_by_table([[1, 2, 3], [9]], [SamplingParams(max_tokens=5), SamplingParams(max_tokens=14)])
    assert texts == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]
    assert finish == [LENGTH, STOP]


def test_generate_with_ignored_eos_runs_on():
    texts, finish = generate_by_table(
        [[9], [10]], [SamplingParams(max_tokens=5, ignore_eos=True), SamplingParams(max_tokens=14)]
    )
    assert texts == [[9, 10, 11, 12, 13, 14], [10, 11, 12]]
    assert finish == [LENGTH, STOP]


def test_generate_with_a_prompt_that_just_fits_takes_it():
    texts, finish = generate_by_table([[1] * 12, [2]], SamplingParams(max_tokens=4))
    assert texts == [[1] * 12 + [2, 3, 4, 5], [2, 3, 4, 5, 6]]
    assert finish == [LENGTH, LENGTH]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "prompt is empty"),
        ([1, 16], 4, "token id 16"),
        ([1, -1], 4, "token id -1"),
        ([1, 2.0], 4, "token id 2.0"),
        ([1, True], 4, "token id True"),
    ],
)
def test_generate_with_a_bad_prompt_says_what_is_wrong(prompt, max_tokens, message):
    with pytest.raises(InputError, match=message):
        generate(table_model(), TABLE_CFG, [[1], prompt], SamplingParams(max_tokens=max_tokens), schedule=TABLE.schedule)


def test_prompt_that_does_not_fit_a_state_is_refused():
    sampling = [SamplingParams(max_tokens=4)]
    with pytest.raises(InputError, match="max_len of 16"):
        start_state(TABLE_CFG, [[1] * 13], sampling, eos_ids=(), max_len=16, schedule=TABLE.schedule)


def test_generate_with_other_numbers_of_prompts_and_parameters_is_refused():
    with pytest.raises(InputError, match="2 prompts but 1 sampling"):
        generate(table_model(), TABLE_CFG, [[1], [2]], [SamplingParams()], schedule=TABLE.schedule)


@pytest.mark.parametrize("asked", [{"n": 2}, {"stop": ("a",)}, {"logprobs": 1}, {"prompt_logprobs": 0}])
def test_generate_refuses_what_only_an_engine_gives(asked):
    with pytest.raises(InputError, match=f"leave out {next(iter(asked))}, or use detspec.Engine"):
        generate(table_model(), TABLE_CFG, [[1]], SamplingParams(**asked), schedule=TABLE.schedule)


def test_generate_takes_drafters_and_no_names_of_them():
    with pytest.raises(InputError, match=r"drafter must be a Drafter, such as .*source_of\('ngram'\)\), got 'ngram'"):
        generate(table_model(), TABLE_CFG, [[1]], SamplingParams(), schedule=TABLE.schedule, drafter="ngram")


def test_init_state_with_a_window_longer_than_its_rows_is_refused():
    with pytest.raises(InputError, match="window"):
        init_state(
            TABLE_CFG, max_requests=1, max_len=8, max_stop_ids=1, max_logit_bias=1, schedule=Schedule(budget=Budget(16, 16))
        )
