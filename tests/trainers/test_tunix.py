"""Tunix's own GRPO learner over an engine: log-probabilities compare equal, and micro-batches of rollouts change no weight."""

import dataclasses
import hashlib
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.common import TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.metrics_logger import Mode

import detspec as ds
from detspec.adapters.nnx_policy import DetspecPolicy, Lora
from detspec.adapters.tunix import PAD, DetspecRollout, TokenizerOfModel, completion_logprobs, detspec_loss
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.errors import InputError
from tests.engine.byte_model import byte_params, without_tokenizer
from tests.fakes import bits

PAGE = Path(__file__).parents[2] / "docs" / "rl_trainers.md"
CONFIG = RolloutConfig(max_tokens_to_generate=12, max_prompt_length=8, temperature=0.7)
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run of the code of the page: SHA-256 of its weights, metrics of each iteration, all kinds of weights that changed."""

    sha: str
    metrics: dict[str, list[float]]
    changed: set[type]


def trained(monkeypatch: pytest.MonkeyPatch, model: Model, *changes: tuple[str, str]) -> Trained:
    """Runs the code of the page on `model`, with some of its text changed."""
    _, _, below = PAGE.read_text(encoding="utf-8").partition("## Tunix")
    source = below.partition("```python\n")[2].partition("```")[0]
    for old, new in changes:
        assert source.count(old) == 1
        source = source.replace(old, new)
    monkeypatch.setattr(ds, "load", lambda path: model)
    names = vars(types.ModuleType("page"))
    exec(compile(source, PAGE.name, "exec"), names)
    trainer = names["cluster"].actor_trainer
    before = nnx.state(DetspecPolicy(model, lora=names.get("lora")))
    changed = set()
    digest = hashlib.sha256()
    for first, (_, last) in zip(leaves(before), nnx.to_flat_state(nnx.state(trainer.model)), strict=True):
        digest.update(np.asarray(last[...]).tobytes())
        if not (np.asarray(first[...]) == np.asarray(last[...])).all():
            changed.add(type(last))
    log = trainer.metrics_logger
    metrics = {
        name: np.asarray(log.get_metric_history("actor", name, Mode.TRAIN)).tolist() for name in trainer.rl_metrics_to_log
    }
    return Trained(digest.hexdigest(), metrics, changed)


def leaves(state: nnx.State) -> list[nnx.Variable]:
    return [variable for _, variable in nnx.to_flat_state(state)]


def micro_batch(size: int) -> tuple[str, str]:
    return ("RLTrainingConfig(", f"RLTrainingConfig(rollout_micro_batch_size={size}, ")


def test_steps_compare_equal_and_weights_do_not_depend_on_micro_batches_of_rollouts(monkeypatch, trained_model):
    runs = [trained(monkeypatch, trained_model, micro_batch(size)) for size in (1, 2, 4)]
    assert len({run.sha for run in runs}) == 1
    for run in runs:
        assert run.metrics["logp_diff_max"][::2] == [0.0, 0.0]  # the first iteration of each step
        assert run.metrics["is_ratio/max"][::2] == [1.0, 1.0]
        assert all(diff > 0 for diff in run.metrics["logp_diff_max"][1::2])  # weights have changed since
        assert run.changed == {nnx.Param}


def test_control_softmax_of_tunix_differs_and_so_do_weights(monkeypatch, trained_model):
    ours = trained(monkeypatch, trained_model)
    theirs = trained(
        monkeypatch, trained_model, ('policy_loss_fn="detspec"', 'policy_loss_fn="grpo"'), ('"logp_diff_max"', '"is_ratio/min"')
    )
    assert any(ratio != 1 for name in ("is_ratio/min", "is_ratio/max") for ratio in theirs.metrics[name][::2])
    assert theirs.sha != ours.sha


def test_adapters_are_trained_alone(monkeypatch, trained_model):
    adapted = ("schedule=engine.schedule", "schedule=engine.schedule, lora=lora")
    imported = ("import DetspecPolicy\n", "import DetspecPolicy, Lora\nlora = Lora(rank=2, alpha=4.0)\n")
    run = trained(monkeypatch, trained_model, adapted, imported)
    assert run.metrics["logp_diff_max"][::2] == [0.0, 0.0]
    assert run.changed == {nnx.LoRAParam}


@pytest.fixture(scope="module")
def engine(trained_model) -> Engine:
    return Engine(trained_model, ds.EngineConfig(max_requests=8, max_len=64))


def rollout_of(engine: Engine, config: RolloutConfig = CONFIG, **changes) -> DetspecRollout:
    policy = DetspecPolicy(engine.model, schedule=engine.schedule)
    return DetspecRollout(policy, TokenizerAdapter(TokenizerOfModel(engine.model)), config, engine=engine, mesh=None, **changes)


def test_samples_of_a_group_differ_and_calls_may_be_cut_anywhere(engine):
    prompts = ["ab", "ab", "c", "ab", "c", "ab"]
    whole = rollout_of(engine).generate(prompts, CONFIG)
    assert len({text for text, prompt in zip(whole.text, prompts, strict=True) if prompt == "ab"}) == 4
    parts = rollout_of(engine)
    cut = [parts.generate(prompts[a:b], CONFIG) for a, b in ((0, 1), (1, 4), (4, 6))]
    assert whole.text == [text for part in cut for text in part.text]
    assert (whole.left_padded_prompt_tokens == np.concatenate([part.left_padded_prompt_tokens for part in cut])).all()
    assert whole.left_padded_prompt_tokens[2].tolist() == [PAD] * 7 + engine.model.tokenizer.encode("c")
    forgetful = rollout_of(engine)
    texts = []
    for a, b in ((0, 1), (1, 4), (4, 6)):
        texts += forgetful.generate(prompts[a:b], CONFIG).text
        forgetful._seen.clear()
    assert texts != whole.text  # the control: prompts counted call by call
    first = [each.tolist() for each in whole.tokens]
    again = parts.generate(prompts, CONFIG)  # the same prompts with the same weights once more: other samples
    assert all(a != b.tolist() for a, b in zip(first, again.tokens, strict=True))
    other_seed = rollout_of(engine, dataclasses.replace(CONFIG, seed=jax.random.PRNGKey(1)))
    assert [each.tolist() for each in other_seed.generate(prompts, CONFIG).tokens] != first
    later = rollout_of(engine, weight_version=1)
    assert [each.tolist() for each in later.generate(prompts, CONFIG).tokens] != first


def test_log_probabilities_of_given_completions_are_those_of_the_rollout(engine):
    rollout = rollout_of(engine)
    found = rollout.generate(["ab", "abc", "c"], CONFIG)
    tokens = np.full((3, 16), PAD)
    for row, each in zip(tokens, found.tokens, strict=True):
        row[: len(each)] = each
    again = rollout.get_per_token_logps(jnp.asarray(found.left_padded_prompt_tokens), jnp.asarray(tokens))
    for row, each in zip(np.asarray(again), found.logprobs, strict=True):
        assert (bits(row[: len(each)]) == bits(each)).all()
        assert (row[len(each) :] == 0).all()


def test_new_weights_are_kept_until_they_are_asked_for(engine):
    rollout = rollout_of(engine)
    before = rollout.generate(["ab"], CONFIG).logprobs[0]
    policy = DetspecPolicy(engine.model, schedule=engine.schedule)
    policy.weights["head"][...] *= 2
    with jax.transfer_guard_device_to_host("disallow_explicit"), jax.transfer_guard_host_to_device("disallow_explicit"):
        rollout.update_params(nnx.state(policy, nnx.Param), (nnx.Param,))
    assert rollout.weight_version == 1
    after = rollout.generate(["ab"], CONFIG).logprobs[0]
    assert engine.fingerprint()["weight_version"] == "tunix 1"
    assert before.tolist() != after.tolist()


def test_what_would_be_of_another_distribution_or_model_is_refused(engine):
    rollout = rollout_of(engine)
    for changes in ({"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(InputError, match="leave both off"):
            rollout.generate(["a"], dataclasses.replace(CONFIG, **changes))
        with pytest.raises(InputError, match="leave both off"):
            rollout_of(engine, dataclasses.replace(CONFIG, **changes))
    with pytest.raises(InputError, match=r"has 9 tokens, RolloutConfig\.max_prompt_length allows 8"):
        rollout.generate(["a" * 9], CONFIG)
    with pytest.raises(InputError, match="one array of numpy"):
        rollout.generate([np.repeat("ab", 2)], CONFIG)
    with pytest.raises(InputError, match="the actor must be a"):
        DetspecRollout(nnx.Dict({}), TokenizerOfModel(engine.model), CONFIG, engine=engine)
    other = DetspecPolicy(engine.model, schedule=engine.schedule.with_budget(8, 2))
    with pytest.raises(InputError, match="different models or schedules"):
        DetspecRollout(other, TokenizerOfModel(engine.model), CONFIG, engine=engine)
    with pytest.raises(InputError, match="Tunix gives prompts as texts"):
        TokenizerOfModel(without_tokenizer(byte_params()))


def test_loss_is_that_of_numpy_and_refuses_what_it_does_not_know(engine):
    policy = DetspecPolicy(engine.model, schedule=engine.schedule)
    prompts = jnp.asarray([[PAD, 5, 6], [7, 8, 9]])
    completions = jnp.asarray([[10, 11, 12, PAD], [13, 14, PAD, PAD]])
    is_new = np.asarray(completions) != PAD
    config = GRPOConfig(
        policy_loss_fn="detspec", beta=0.5, epsilon=0.1, loss_agg_mode="token-mean", kl_loss_mode="mse_kl", num_generations=2
    )
    config.temperature = 0.9
    now = np.asarray(completion_logprobs(policy, prompts, completions, PAD, 0.9), np.float64)
    gains = np.asarray([1.0, -2.0])
    moved = np.asarray([[0.3, -0.3, 0.0, 9.0], [0.3, -0.3, 9.0, 9.0]])
    example = TrainExample(
        prompt_ids=prompts,
        prompt_mask=prompts != PAD,
        completion_ids=completions,
        completion_mask=jnp.asarray(is_new),
        advantages=jnp.asarray(gains, jnp.float32),
        ref_per_token_logps=jnp.asarray(now - 0.2, jnp.float32),
        old_per_token_logps=jnp.asarray(now - moved, jnp.float32),
    )
    loss, metrics = detspec_loss(policy, example, config, PAD, 0)
    ratio = np.exp(moved)
    each = -np.minimum(ratio * gains[:, None], np.clip(ratio, 0.9, 1.1) * gains[:, None]) + 0.5 * 0.5 * 0.2**2
    assert float(loss) == pytest.approx(each[is_new].mean(), rel=1e-5)  # float32
    assert float(metrics["kl"]) == pytest.approx(0.5 * 0.2**2, rel=1e-4)
    assert float(metrics["pg_clipfrac"]) == pytest.approx(2 / 5)  # above for the gain, below for the loss
    assert float(metrics["logp_diff_max"]) == pytest.approx(0.3, rel=1e-5)
    assert float(metrics["is_ratio/min"]) == pytest.approx(np.exp(-0.3), rel=1e-5)
    config.loss_algo = "gspo-token"
    with pytest.raises(InputError, match="without epsilon_c"):
        detspec_loss(policy, example, config, PAD, 0)
    with pytest.raises(InputError, match="no packed sequences"):
        detspec_loss(policy, dataclasses.replace(example, segment_ids=completions), config, PAD, 0)


def test_qwix_adds_no_adapter_as_the_page_says(engine):
    policy = DetspecPolicy(engine.model, schedule=engine.schedule)
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=4.0)
    found = qwix.apply_lora_to_model(policy, provider, jnp.ones((1, 4), jnp.int32), rngs=nnx.Rngs(0))
    assert not any(isinstance(node, nnx.LoRAParam) for _, node in nnx.iter_graph(found))
    own = DetspecPolicy(engine.model, schedule=engine.schedule, lora=Lora(2, 4.0))
    assert sum(isinstance(node, nnx.LoRAParam) for _, node in nnx.iter_graph(own)) == 2 * 7
