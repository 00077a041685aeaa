"""A policy whose gradients several chips share out has the weights of one chip."""

import pytest

import detspec.rl as rl
from detspec.environment import default_schedule
from tests.rl.small_policy import CFG, PROMPTS, SAMPLING, make_policy, rewards_of

pytestmark = pytest.mark.optimised


def policy(chips: int, leaf: int = 2) -> rl.Policy:
    schedule = default_schedule(CFG).with_numerics(page=16).with_budget(8, 4)
    return make_policy(leaf=leaf, chips=chips, schedule=schedule)


def test_weights_have_the_same_bits_on_one_chip_and_on_two_and_others_with_other_leaves():
    groups = policy(1).rollouts(PROMPTS, samples=4, sampling=SAMPLING)

    def weights(learner: rl.Policy) -> str:
        metrics = learner.update(groups, rewards_of(groups), rl.grpo())
        assert metrics["logprob_bits_differ"] == 0
        return learner.digest()

    found = weights(policy(1))
    assert weights(policy(2)) == found
    assert weights(policy(1, leaf=4)) != found
