"""A policy refuses, with one error each, and stays as it was."""

import dataclasses
from functools import cache

import jax
import numpy as np
import optax
import pytest

import detspec.rl as rl
from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.model.params import init_params
from tests.rl.small_policy import CFG, PROMPTS, SAMPLING, make_policy, small_model, some_rollouts, with_sampling
from tests.thinking.fakes import THINKER_CFG


@cache
def policy() -> rl.Policy:
    return make_policy()


REFUSED = {
    "equal seeds": (with_sampling(some_rollouts(), seed=7), "texts of group 0 share a seed, so they are one text"),
    "a text alone": (some_rollouts(1), "group 0 has 1 text, and advantages compare texts"),
    "another version": (some_rollouts(version="run:3"), "was sampled by the weights 'run:3', this step learns from 'run:0'"),
    "two temperatures": (
        [*some_rollouts(1), *with_sampling(some_rollouts(2)[1:], temperature=0.7)],
        "'0/0/1' was sampled at the temperature 0.7, others at 0.9: a step has one",
    ),
    "top_p": (with_sampling(some_rollouts(), top_p=0.9), r"leave out top_p \(0.9\)"),
    "top_k": (with_sampling(some_rollouts(), top_k=5), "leave out top_k"),
    "min_p": (with_sampling(some_rollouts(), min_p=0.1), "leave out min_p"),
    "min_tokens": (with_sampling(some_rollouts(), min_tokens=2), "leave out min_tokens"),
    "penalties": (with_sampling(some_rollouts(), presence_penalty=0.5), "leave out presence_penalty"),
    "bias": (with_sampling(some_rollouts(), logit_bias=((3, 1.0),)), "leave out logit_bias"),
    "ordinary": (with_sampling(some_rollouts(), deterministic=False), "rollouts must be deterministic"),
    "raw": (with_sampling(some_rollouts(), logprobs_mode="raw"), "must report logprobs_mode='tempered', got 'raw'"),
    "no log-probabilities": (some_rollouts(logprobs=None), "'0/0/0' has 3 tokens and 0 finite log-probabilities"),
    "nan": (some_rollouts(logprobs=np.float32([0, np.nan, 0])), "has 3 tokens and 2 finite log-probabilities"),
    "too few": (some_rollouts(logprobs=np.zeros(2, np.float32)), "has 3 tokens and 2 finite log-probabilities"),
    "a leaf": (some_rollouts(), "a step has 2 texts, which leaves of 4 do not divide: choose another leaf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_update_refuses_and_the_policy_stays_as_it_was(name):
    group, message = REFUSED[name]
    before = policy().digest(), policy().version
    with pytest.raises(InputError, match=message) as raised:
        policy().update([group], [[float(i) for i in range(len(group))]], rl.grpo())
    assert "\n" not in str(raised.value)
    assert (policy().digest(), policy().version) == before


@pytest.mark.parametrize(
    ("rewards", "message"),
    [([[1.0, float("nan")]], "reward of '0/0/1'"), ([[1.0]], "one for each text"), ([1.0, 2.0], "a list")],
)
def test_update_refuses_rewards(rewards, message):
    with pytest.raises(InputError, match=message):
        policy().update([some_rollouts()], rewards, rl.grpo())


def test_update_of_nothing_is_refused():
    with pytest.raises(InputError, match="there is nothing to learn from"):
        policy().update([], [], rl.grpo())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": [[1] * 40]}, "40"),
        ({"prompts": [[]]}, "empty"),
        ({"prompts": [[2048]]}, "0 .. 2047"),
        ({"samples": 0}, "samples must be a positive integer, got 0"),
        ({"sampling": dataclasses.replace(SAMPLING, temperature=0.0)}, "a temperature above 0: greedy texts"),
        ({"sampling": dataclasses.replace(SAMPLING, top_p=0.5)}, "leave out top_p"),
        ({"sampling": dataclasses.replace(SAMPLING, n=4)}, "leave out n"),
        ({"sampling": dataclasses.replace(SAMPLING, deterministic=False)}, "rollouts must be deterministic"),
    ],
)
def test_rollouts_are_refused_before_anything_runs(changed, message):
    with pytest.raises(InputError, match=message) as raised:
        policy().rollouts(**{"prompts": PROMPTS, "samples": 2, "sampling": SAMPLING, **changed})
    assert "\n" not in str(raised.value)


def test_models_and_settings_that_cannot_be_trained_are_refused():
    thinker = Model(THINKER_CFG, init_params(THINKER_CFG, jax.random.key(0)), None, (), "digest")
    int8 = dataclasses.replace(small_model(), cfg=dataclasses.replace(CFG, weights="int8"))
    for model, settings, message in [
        (thinker, {}, "this one thinks"),
        (int8, {}, "this one has weights in int8"),
        (small_model(), {"leaf": 0}, "leaf must be a positive integer, got 0"),
        (small_model(), {"chips": 9}, "9 chips were asked for"),
    ]:
        with pytest.raises(InputError, match=message):
            rl.Policy(model, EngineConfig(max_requests=2, max_len=48), optimizer=optax.sgd(1.0), **settings)


def test_equal_rewards_skip_the_step_keep_the_weights_and_warn_after_five():
    policy = make_policy(run="idle", leaf=2)
    digest = policy.digest()
    for step in range(4):
        metrics = policy.update([some_rollouts(version=f"idle:{step}")], [[0.1, 0.1]], rl.grpo())
        assert metrics["skipped"] == 1
        assert policy.step == step + 1
    with pytest.warns(UserWarning, match="5 steps had groups of equal rewards alone"):
        policy.update([some_rollouts(version="idle:4")], [[0.1, None]], rl.grpo())
    assert policy.digest() == digest
