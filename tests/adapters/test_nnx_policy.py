"""A module of flax.nnx: trained by nnx's optimisers, whole or by adapters, and the engine's bits before and after each step."""

import dataclasses
import types
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import detspec as ds
from detspec.adapters.nnx_policy import Adapted, DetspecPolicy, Lora, low_rank, shifted
from detspec.checkpoint.load import Model
from detspec.config import ThinkingConfig
from detspec.engine.engine import Engine
from detspec.errors import InputError
from detspec.ops.row_sum import sum_fn
from detspec.sampler import logprobs_at
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import BYTE_CFG, MAX_LEN, SCHEDULE, byte_params, make_engine, without_tokenizer
from tests.fakes import bits

# Kernels give a row its bits in every program; XLA's products, as on most devices, only by the certificates of an engine.
KERNELS = SCHEDULE.with_numerics(implementation="cpu", linear="pinned")
PAGE = Path(__file__).parents[2] / "docs" / "rl_trainers.md"
PROMPTS = [[5, 17, 9], list(range(20)), [3]]
TEMPERATURE = 0.7


@dataclasses.dataclass(frozen=True)
class Rolled:
    """Texts `tokens [B, T]` of `lengths [B]`, and what the engine reported of their new tokens, 0 elsewhere."""

    tokens: jax.Array
    lengths: jax.Array
    reported: np.ndarray

    @property
    def is_new(self) -> np.ndarray:
        return self.reported != 0


@pytest.fixture(scope="module")
def policy_model() -> Model:
    return without_tokenizer(byte_params())


def rollouts(engine: Engine, temperature: float) -> Rolled:
    sampling = [
        SamplingParams(max_tokens=9 + 4 * i, temperature=temperature, seed=i, logprobs_mode="tempered")
        for i in range(len(PROMPTS))
    ]
    tokens = np.zeros((len(PROMPTS), MAX_LEN), np.int32)
    reported = np.zeros(tokens.shape, np.float32)
    lengths = []
    for b, (prompt, completion) in enumerate(zip(PROMPTS, engine.generate(PROMPTS, sampling), strict=True)):
        text = [*prompt, *completion.token_ids]
        tokens[b, : len(text)] = text
        reported[b, len(prompt) : len(text)] = completion.logprobs
        lengths.append(len(text))
    return Rolled(jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32), reported)


def bytes_of(policy: DetspecPolicy) -> dict[type, list[bytes]]:
    """The bytes of all variables, by their kind."""
    found = defaultdict(list)
    for _, node in nnx.iter_graph(policy):
        if isinstance(node, nnx.Variable):
            found[type(node)].append(np.asarray(node[...]).tobytes())
    return found


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.programs(20)
def test_steps_of_nnx_optimizer_train_and_keep_the_engines_bits(policy_model):
    engine = make_engine(policy_model, 3, "none", schedule=KERNELS)
    policy = DetspecPolicy(policy_model, schedule=KERNELS)
    optimizer = nnx.Optimizer(policy, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(policy: DetspecPolicy, optimizer: nnx.Optimizer, tokens, lengths, is_new):
        def loss(policy: DetspecPolicy):
            found = policy.logprobs(tokens, lengths, TEMPERATURE)
            return -jnp.sum(found * is_new) / is_new.sum(), found

        gradient, found = nnx.grad(loss, has_aux=True)(policy)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(policy, gradient)
        return found

    reports = []
    for number in range(3):
        rolled = rollouts(engine, TEMPERATURE)
        reports.append(rolled.reported.tobytes())
        found = step(policy, optimizer, rolled.tokens, rolled.lengths, rolled.is_new.astype(np.float32))
        assert rolled.is_new.sum() == sum(9 + 4 * i for i in range(len(PROMPTS)))
        assert (bits(found)[rolled.is_new] == bits(rolled.reported)[rolled.is_new]).all()
        engine.update_params(policy.published(), weight_version=f"step {number + 1}")
    assert len(set(reports)) == 3  # the weights that sample have changed


@pytest.mark.optimised
@pytest.mark.programs(20)
def test_code_of_the_page_trains_adapters_alone_and_keeps_the_engines_bits(policy_model, monkeypatch):
    source = PAGE.read_text(encoding="utf-8").partition("## flax.nnx")[2].partition("```python\n")[2].partition("```")[0]
    monkeypatch.setattr(ds, "load", lambda path: policy_model)
    monkeypatch.setattr(ds, "EngineConfig", lambda **given: make_engine(policy_model, 3, "none", schedule=KERNELS).config)
    page = vars(types.ModuleType("page"))
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(source, PAGE.name, "exec"), page)
        policy = page["policy"]
        first = bytes_of(policy)
        for number in range(3):
            rolled = rollouts(page["engine"], 0.9)
            found = page["step"](policy, page["optimizer"], rolled.tokens, rolled.lengths, rolled.is_new.astype(np.float32))
            assert (bits(found)[rolled.is_new] == bits(rolled.reported)[rolled.is_new]).all()
            page["engine"].update_params(policy.published(), weight_version=f"step {number + 1}")
    last = bytes_of(policy)
    assert last[nnx.Param] == first[nnx.Param]
    assert len(last[nnx.LoRAParam]) == 2 * 7
    assert all(a != b for a, b in zip(first[nnx.LoRAParam], last[nnx.LoRAParam], strict=True))


@pytest.mark.optimised
@pytest.mark.programs(20)
def test_logits_of_texts_padded_at_either_end_have_the_engines_bits_and_a_trainers_softmax_has_not(policy_model):
    policy = DetspecPolicy(policy_model, schedule=KERNELS)
    lengths = np.asarray([30, 7], np.int32)
    texts = jnp.asarray(np.random.default_rng(0).integers(0, 2048, (2, 32)), jnp.int32)
    before = np.asarray([1, 20], np.int32)
    padded = np.full((2, 32), -1, np.int32)
    for b in range(2):
        padded[b, before[b] : before[b] + lengths[b]] = texts[b, : lengths[b]]
    is_token = padded != -1
    mask = jnp.asarray(np.tril(np.ones((32, 32), bool))[None] & is_token[:, None, :])
    found, cache = policy(jnp.asarray(padded), positions=None, cache=None, attention_mask=mask)
    assert cache is None
    assert found.shape == (2, 32, 2048)
    logits = shifted(found, jnp.asarray(before)).reshape(64, -1)
    following = jnp.roll(texts, -1, 1).reshape(-1)
    expected = jnp.roll(policy.logprobs(texts, jnp.asarray(lengths)), -1, 1).reshape(-1)
    is_scored = np.asarray(expected) != 0
    assert is_scored.sum() == 29 + 6
    own = jax.jit(lambda logits: logprobs_at(logits, following, sum_fn(KERNELS.numerics)))(logits)
    assert (bits(own) == bits(expected))[is_scored].all()
    theirs = jax.jit(lambda logits: logits[jnp.arange(64), following] - jax.nn.logsumexp(logits, axis=-1))(logits)
    assert (bits(theirs) != bits(expected))[is_scored].any()


@pytest.mark.slow
def test_derivatives_reach_weights_through_logits_as_through_logprobs(policy_model):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), byte_params())
    cfg = dataclasses.replace(BYTE_CFG, dtype="float32")
    policy = DetspecPolicy(dataclasses.replace(policy_model, cfg=cfg, params=params), schedule=KERNELS)
    tokens = jnp.asarray([[-1, -1, 7, 8, 9, 10]], jnp.int32)  # padded as Tunix does it
    mask = jnp.asarray(np.tril(np.ones((6, 6), bool)) & (np.arange(6) > 1))[None]
    weight = jnp.asarray([[0.0, 0.0, 0.0, 1.0, -2.0, 0.5]])

    def through_logits(policy: DetspecPolicy) -> jax.Array:
        found = jax.nn.log_softmax(policy(tokens, attention_mask=mask)[0])
        return (jnp.take_along_axis(found[:, :-1], tokens[:, 1:, None], 2)[..., 0] * weight[:, 1:]).sum()

    def through_logprobs(policy: DetspecPolicy) -> jax.Array:
        found = policy.logprobs(jnp.roll(tokens, -2, 1), jnp.asarray([4], jnp.int32))
        return (found[:, 1:4] * weight[:, 3:]).sum()

    both = nnx.jit(lambda policy: (nnx.grad(through_logits)(policy), nnx.grad(through_logprobs)(policy)))(policy)
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        assert float(jnp.abs(b).max()) > 0
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(jnp.abs(b).max()))  # sums in other orders


@pytest.mark.optimised
def test_adapters_merge_to_the_same_bits_in_every_program_and_products_of_xla_do_not():
    key = jax.random.split(jax.random.key(0), 2)
    shapes = [(64, 96), (33, 128)]
    matrices = [jax.random.normal(key[0], shape) for shape in shapes]
    adapted = nnx.List([Adapted(w, Lora(5, 3.0), k) for w, k in zip(matrices, key, strict=True)])
    for each in adapted:
        each.lora_b[...] = jax.random.normal(key[1], each.lora_b.shape)

    def merge(adapted, product):
        return [each.weight[...] + product(each.lora_a[...], each.lora_b[...]) * 0.6 for each in adapted]

    alone = [nnx.jit(Adapted.merged)(each) for each in adapted]
    together = nnx.jit(lambda adapted: [each.merged() for each in adapted])(adapted)
    assert all((bits(a) == bits(b)).all() for a, b in zip(alone, together, strict=True))
    ordinary = merge(adapted, lambda a, b: b @ a.T)
    in_one = nnx.jit(lambda adapted: merge(adapted, lambda a, b: b @ a.T))(adapted)
    assert any((bits(a) != bits(b)).any() for a, b in zip(ordinary, in_one, strict=True))


def test_low_rank_product_and_its_derivatives_are_those_of_a_product():
    a, b = jax.random.normal(jax.random.key(1), (7, 2)), jax.random.normal(jax.random.key(2), (5, 2))
    of_sum = jax.random.normal(jax.random.key(3), (5, 7))

    @jax.jit
    def both(a, b):
        found, of_found = jax.vjp(low_rank, a, b)
        expected, of_expected = jax.vjp(lambda a, b: b @ a.T, a, b)
        return (found, *of_found(of_sum)), (expected, *of_expected(of_sum))

    for own, other in zip(*both(a, b), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)  # 22 bits of each product


def test_published_weights_outlive_donated_masters(policy_model):
    model = dataclasses.replace(
        policy_model,
        cfg=dataclasses.replace(BYTE_CFG, dtype="float32"),
        params=jax.tree.map(lambda leaf: leaf.astype(jnp.float32), byte_params()),
    )
    policy = DetspecPolicy(model, schedule=KERNELS)
    published = policy.published()
    for leaf in jax.tree.leaves(nnx.state(policy)):
        leaf.delete()
    for leaf, own in zip(jax.tree.leaves(published), jax.tree.leaves(model.params), strict=True):
        assert (np.asarray(leaf) == np.asarray(own)).all()  # the model's own arrays are left alone, too


def test_what_cannot_be_trained_is_refused(policy_model):
    with pytest.raises(InputError, match="matches no matrix; matrices are such as"):
        DetspecPolicy(policy_model, lora=Lora(2, 1.0, paths="q"))
    with pytest.raises(InputError, match=r"Lora\.rank must be a positive integer"):
        Lora(0, 1.0)
    with pytest.raises(InputError, match="keeps no cache"):
        DetspecPolicy(policy_model)(jnp.zeros((1, 2), jnp.int32), None, {}, None)
    thinks = dataclasses.replace(policy_model, cfg=dataclasses.replace(BYTE_CFG, thinking=ThinkingConfig(4, 0, 1, 4, 0)))
    with pytest.raises(InputError, match="a model that thinks"):
        DetspecPolicy(thinks)
