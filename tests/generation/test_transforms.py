"""The table "Transforms" of docs/extending.md: which of jax's transforms take what, with which bits, and what says no."""

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detspec as ds
from detspec.draft.given import NONE
from detspec.draft.source import Drafter, draft_fn
from detspec.environment import chosen_schedule
from detspec.generation.init import start_state
from detspec.generation.loop import default_source, dvr_step, generate_state
from detspec.generation.prefill import prefill
from detspec.model.params import Params, init_params, param_shapes
from detspec.model.transformer import forward_sequences
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import GenState
from tests.examples import example

CFG = ds.dense_config(96, 32, 1, 2, 1, 16, 48, max_position=32)
SCHEDULE = Schedule(Numerics(page=16, implementation="cpu", linear="pinned"), Budget(8, 2))
NO_TRANSFORM = "detspec.score gives arrays of numpy, so no jax transform takes it"
PROMPTS = [[1, 2, 3], [4, 5]]
SAMPLING = ds.SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
TOKENS = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]], jnp.int32)
ZEROS = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), param_shapes(CFG))


@cache
def models() -> list[Params]:
    """Two models of random weights."""
    return [init_params(CFG, jax.random.key(seed)) for seed in range(2)]


def stacked() -> Params:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *models())


def flat_bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def element(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def new_state() -> GenState:
    return start_state(CFG, PROMPTS, [SAMPLING] * 2, eos_ids=(), max_len=16, schedule=SCHEDULE)


def generate(params: Params, prompts: Any = PROMPTS) -> GenState:
    return ds.generate(params, CFG, prompts, SAMPLING, schedule=SCHEDULE)


def step(params: Params, state: GenState) -> GenState:
    return dvr_step(params, CFG, state, draft_fn=draft_fn(Drafter(NONE), SCHEDULE), schedule=SCHEDULE)[0]


jitted_step = jax.jit(step)


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(forward_sequences(params, CFG, tokens)[0]).max()


@pytest.fixture(scope="module")
def state() -> GenState:
    """A state whose prompts are read."""
    return jax.jit(partial(prefill, cfg=CFG, schedule=SCHEDULE))(models()[0], state=new_state())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return example("Several models at once", tmp_path_factory)


@pytest.mark.optimised
def test_forward_sequences_is_differentiated_and_mapped():
    gradient = jax.jit(jax.vmap(jax.grad(loss), in_axes=(0, None)))(stacked(), TOKENS)
    assert all(leaf.shape == like.shape for leaf, like in zip(*map(jax.tree.leaves, (gradient, stacked())), strict=True))
    assert flat_bits(element(gradient, 0)) != flat_bits(element(gradient, 1))
    assert all(np.abs(np.asarray(leaf, np.float32)).max() > 0 for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("axes", [(0, None), (None, 0)], ids=["models", "states"])
def test_step_under_vmap_has_the_bits_of_a_loop(axes: tuple[int | None, int | None], state: GenState):
    others = state.replace(tokens=state.tokens.at[:, 0].set(9))  # nothing reads what a pass has read
    args = (stacked() if axes[0] == 0 else models()[0], state if axes[1] is None else jax.tree.map(stack, state, others))
    mapped = jax.jit(jax.vmap(step, axes))(*args)
    each = [
        jitted_step(*(arg if axis is None else element(arg, i) for arg, axis in zip(args, axes, strict=True))) for i in range(2)
    ]
    assert [flat_bits(element(mapped, i)) for i in range(2)] == [flat_bits(one) for one in each]
    assert flat_bits(each[0]) != flat_bits(each[1])


def stack(*leaves: Any) -> jax.Array:
    return jnp.stack([jnp.asarray(leaf) for leaf in leaves])


@pytest.mark.optimised
def test_scanned_steps_have_the_bits_of_single_ones(state: GenState):
    scanned, _ = jax.jit(lambda state: jax.lax.scan(lambda state, _: (step(models()[0], state), None), state, length=2))(state)
    once = jitted_step(models()[0], state)
    assert flat_bits(scanned) == flat_bits(jitted_step(models()[0], once)) != flat_bits(once)


@pytest.mark.optimised  # as the tests whose programs it shares
def test_step_donates_nothing_unless_it_is_jitted_so(state: GenState):
    jitted_step(models()[0], state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    given = jax.tree.map(jnp.copy, state)
    jax.jit(step, donate_argnums=1)(models()[0], given)
    assert given.cache.pools[0].k.is_deleted()


@pytest.mark.slow
@pytest.mark.optimised
def test_several_models_of_the_page_have_the_bits_of_each_alone(page):
    each = [ds.generate(params, page.cfg, [[1, 2, 3]], page.sampling) for params in page.models]
    assert [flat_bits(element(page.states, i)) for i in range(2)] == [flat_bits(one) for one in each]
    assert flat_bits(each[0]) != flat_bits(each[1])


@pytest.mark.optimised
def test_generate_state_donates_its_state_and_no_weights(page):
    """The program is that of `detspec.generate` in the test above."""
    schedule = chosen_schedule(None, page.cfg)
    state = start_state(page.cfg, [[1, 2, 3]], [page.sampling], eos_ids=(), max_len=schedule.numerics.page, schedule=schedule)
    run = partial(generate_state, page.models[0], page.cfg, schedule=schedule, source=default_source(schedule))
    run(state=state)
    assert state.cache.pools[0].k.is_deleted()
    assert not page.models[0]["embed"].is_deleted()
    with pytest.raises(Exception, match="deleted"):
        run(state=state)


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: jax.grad(lambda params: generate(params).logprobs.sum())(ZEROS), "detspec.generate has no derivative: take"),
        (lambda: jax.jit(generate)(ZEROS, TOKENS), "prompts of detspec.generate must be known before a program is made"),
        (lambda: jax.jit(score)(ZEROS), NO_TRANSFORM),
        (lambda: jax.grad(score)(ZEROS), NO_TRANSFORM),
        (lambda: jax.vmap(score)(jax.tree.map(lambda leaf: leaf[None], ZEROS)), NO_TRANSFORM),
        (lambda: jax.jit(engine)(ZEROS), "an engine runs programs of its own: make it outside of jax.jit"),
    ],
    ids=["grad of generate", "jit of prompts", "jit of score", "grad of score", "vmap of score", "jit of an engine"],
)
def test_transform_that_does_not_apply_says_what_to_do(refused: Callable[[], Any], says: str):
    with pytest.raises(ds.InputError, match=says):
        refused()


def engine(params: Params) -> Any:
    return ds.Engine(ds.Model(CFG, params, None, (), "traced")).num_places


def score(params: Params) -> Any:
    return ds.score(params, CFG, PROMPTS, schedule=SCHEDULE)[0]


def test_loops_of_jax_take_generation_and_whole_sequences():
    several = jax.tree.map(lambda leaf: leaf[None], ZEROS)
    assert jax.eval_shape(lambda params: jax.lax.map(generate, params), several).committed.shape == (1, 2)

    def descend(params: Params, tokens: jax.Array) -> tuple[Params, None]:
        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, tokens)), None

    assert jax.eval_shape(partial(jax.lax.scan, descend), ZEROS, TOKENS[None])[0]["embed"].shape == (96, 32)


def test_step_has_no_derivative():
    state = new_state()
    with pytest.raises(ValueError, match=r"FFI call to .* cannot be differentiated"):
        jax.eval_shape(jax.grad(lambda params: step(params, state).logprobs.sum()), ZEROS)
