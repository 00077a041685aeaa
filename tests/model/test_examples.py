"""Layers and drafts that docs/extending.md builds: they hold what the engine promises, and the numbers that they should."""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detspec as ds
from detspec.config import ModelConfig
from detspec.draft.given import NONE
from detspec.draft.source import Drafter, DraftSource, costs_nothing, draft_limit, no_state
from detspec.model.params import active_params, init_params, num_params
from detspec.model.transformer import forward_sequences
from detspec.state import Draft
from tests.examples import example
from tests.fakes import bits

pytestmark = pytest.mark.slow

SCHEDULE = ds.Schedule().with_numerics(page=16, linear="pinned").with_budget(16, 4)
SAMPLING = [ds.SamplingParams(max_tokens=45, temperature=float(i % 2), seed=i, ignore_eos=True) for i in range(4)]


@pytest.fixture(scope="module")
def unrotated(tmp_path_factory) -> ModuleType:
    return example("Layers without rotation", tmp_path_factory)


@pytest.fixture(scope="module")
def gated(tmp_path_factory) -> ModuleType:
    return example("An attention of your own", tmp_path_factory)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> ModuleType:
    return example("A router of your own", tmp_path_factory)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory) -> ModuleType:
    return example("A recurrent layer with pools of its own", tmp_path_factory)


def model_of(cfg: ModelConfig) -> ds.Model:
    return ds.Model(cfg, init_params(cfg, jax.random.key(0)), None, (), "example")


def engine_of(model: ds.Model, **config) -> ds.Engine:
    settings = {"max_requests": 4, "max_len": 64, "schedule": SCHEDULE, "num_speculative_tokens": 3, "compile_cache": False}
    return ds.Engine(model, ds.EngineConfig(**{**settings, **config}))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 211, length).tolist() for length in (1, 9, 5, 13)]


def facts(engine: ds.Engine, some: slice = slice(None)) -> list[tuple]:
    outs = engine.generate(prompts()[some], SAMPLING[some])
    return [(out.token_ids, bits(np.asarray(out.logprobs, np.float32)).tolist()) for out in outs]


def check_promises(cfg: ModelConfig) -> None:
    """Batch, order, drafts, preemption and windows change no bit; scores are those of generation."""
    model = model_of(cfg)
    engine = engine_of(model, method="none", num_pages=8)
    expected = facts(engine)
    assert [facts(engine, slice(i, i + 1))[0] for i in range(4)] == expected
    few_pages = engine_of(model, method="self", num_pages=8)
    assert facts(few_pages) == expected
    assert few_pages.num_preemptions
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts(), expected, strict=True)]
    greedy = [0, 2]  # scores are raw log-probabilities, as those of generation
    scored = engine.score([texts[i] for i in greedy], [len(prompts()[i]) for i in greedy])
    assert [bits(np.asarray(out.logprobs, np.float32)).tolist() for out in scored] == [expected[i][1] for i in greedy]


def through_cache(cfg: ModelConfig, params, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of `tokens[1:]` by canonical passes."""
    (found,) = ds.score(params, cfg, [tokens], schedule=SCHEDULE)
    return found[1:]


def whole(cfg: ModelConfig, params, tokens: list[int]) -> np.ndarray:
    """Log-probabilities by a pass over the whole sequence, as in training."""
    logits, _ = forward_sequences(params, cfg, jnp.asarray([tokens]))
    logprobs = jax.nn.log_softmax(logits[0, :-1])
    return np.asarray(jnp.take_along_axis(logprobs, jnp.asarray(tokens)[1:, None], axis=1)[:, 0])


def check_whole_is_cached(cfg: ModelConfig) -> None:
    """Both ways through a layer say the same: in float32, up to the rounding of sums."""
    cfg = dataclasses.replace(cfg, dtype="float32")
    params = init_params(cfg, jax.random.key(1))
    tokens = np.random.default_rng(1).integers(0, 211, 40).tolist()
    np.testing.assert_allclose(through_cache(cfg, params, tokens), whole(cfg, params, tokens), atol=2e-5)


@pytest.mark.programs(40)
@pytest.mark.optimised
@pytest.mark.parametrize("name", ["gated", "experts", "recurrent"])
def test_layers_of_another_kind_keep_the_promises_of_the_engine(name, request):
    check_promises(request.getfixturevalue(name).cfg)


@pytest.mark.programs(8)
@pytest.mark.parametrize("name", ["unrotated", "gated", "experts", "recurrent"])
def test_layers_of_another_kind_say_the_same_of_whole_sequences_and_through_the_cache(name, request):
    check_whole_is_cached(request.getfixturevalue(name).cfg)


@pytest.mark.programs(8)
def test_layer_without_rotation_sees_no_positions(unrotated):
    """Two orders of the same earlier tokens: only layers that rotate tell them apart."""
    cfg = dataclasses.replace(unrotated.cfg, dtype="float32", pattern=(1, 1))
    for pattern, alike in (((1,), True), ((0,), False)):
        cfg = dataclasses.replace(cfg, pattern=pattern)
        params = init_params(cfg, jax.random.key(2))
        first, second = ([*order, 7, 9] for order in ([3, 4, 5, 6], [5, 3, 6, 4]))
        found = [whole(cfg, params, tokens)[-1] for tokens in (first, second)]
        assert np.isclose(*found, atol=1e-5) == alike


def test_experts_count_as_far_as_a_token_takes_them(experts):
    """8 experts of 3 x 48 x 64 weights, 4 of them for a token, and a router of 8 x 64, in each of two layers."""
    dense = num_params(experts.dense) - 2 * 3 * 96 * 64
    assert num_params(experts.cfg) == dense + 2 * (8 * 3 * 48 * 64 + 8 * 64)
    assert active_params(experts.cfg) == num_params(experts.cfg) - 211 * 64 - 2 * 4 * 3 * 48 * 64


def test_draft_source_of_the_page_is_accepted_where_a_text_repeats_itself(tmp_path_factory):
    page = example("A text that repeats itself", tmp_path_factory)
    assert "0, 0, 0," in page.out.text
    assert page.out.stats.num_accepted_draft_tokens > 20


def wrong(draft_params, params, cfg, state, schedule, num_tokens) -> Draft:
    """Drafts token 0 all over."""
    final = jnp.zeros_like(state.live)
    tokens = jnp.zeros((final.shape[0], num_tokens), jnp.int32)
    return Draft(
        tokens=tokens,
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        count=draft_limit(state, num_tokens, final),
        chance=jnp.full(final.shape, 0.5, jnp.float32),
        final=final,
        cache=state.cache,
        state=state.draft,
    )


WRONG = DraftSource("wrong", no_state, wrong, costs_nothing, executes=False, prior_acceptance=0.5)


def generated(cfg: ModelConfig, source: DraftSource) -> list[tuple]:
    """Result of `ds.generate` with drafts of `source`; nothing is certified."""
    params = init_params(cfg, jax.random.key(0))
    state = ds.generate(params, cfg, prompts(), SAMPLING, schedule=SCHEDULE, drafter=Drafter(source))
    found = zip(prompts(), *map(np.asarray, (state.committed, state.tokens, state.logprobs)), strict=True)
    return [(text[len(p) : end].tolist(), bits(logprobs[len(p) : end]).tolist()) for p, end, text, logprobs in found]


@pytest.mark.programs(8)
@pytest.mark.optimised
def test_recurrent_layer_rolls_back_by_its_ring_of_two_pages(recurrent):
    """The inverse control: with one page, a rollback over the border of a page does not find the state before it."""

    @dataclasses.dataclass(frozen=True)
    class OnePage(recurrent.DeltaNet):
        def _ring(self, number):
            return jnp.zeros_like(number), jnp.zeros_like(number)

    expected = generated(recurrent.cfg, NONE)
    assert generated(recurrent.cfg, WRONG) == expected
    layer = recurrent.recurrent
    one_page = dataclasses.replace(layer, mixer=OnePage(**vars(layer.mixer)))
    cfg = dataclasses.replace(recurrent.cfg, kinds=(recurrent.dense.layer(0), one_page))
    assert generated(cfg, NONE) == expected
    assert generated(cfg, WRONG) != expected


@pytest.mark.programs(4)
def test_recurrent_layers_share_no_pages_and_draft_a_page_at_most(recurrent):
    model = model_of(recurrent.cfg)
    with pytest.raises(ds.InputError, match=r"rolled back by a page of 16 tokens: draft at most as many .*, not 31"):
        engine_of(model, num_speculative_tokens=31)
    with pytest.raises(ds.InputError, match="states by sequence cannot be a draft model"):
        ds.draft_model(model, target=model)
    with pytest.raises(ds.InputError, match=r'need Numerics.alignment "free", got .window.'):
        engine_of(model, schedule=SCHEDULE.with_numerics(alignment="window"))
    wide = SCHEDULE.with_numerics(page=4, query_tile=4).with_budget(16, 16)
    with pytest.raises(ds.InputError, match=r"page of 4 tokens: draft at most as many .*, not 15"):
        ds.generate(model.params, model.cfg, [[1, 2]], SAMPLING[:1], schedule=wide)
    engine = engine_of(model)
    prompt = list(range(40))
    first, second = (engine.generate([prompt], ds.SamplingParams(max_tokens=4, ignore_eos=True))[0] for _ in range(2))
    assert first.token_ids == second.token_ids
