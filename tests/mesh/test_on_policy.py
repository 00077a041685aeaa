"""A policy whose gradients several chips share out has the weights of one chip."""

import pytest

import detspec.rl as rl
from detspec.environment import default_schedule
from tests.rl.small_policy import CFG, PROMPTS, SAMPLING, make_policy, rewards_of

pytestmark = pytest.mark.optimised


def weights_after_two_steps(chips: int, leaf: int = 2) -> str:
    schedule = default_schedule(CFG).with_numerics(page=16).with_budget(8, 4)
    policy = make_policy(leaf=leaf, chips=chips, schedule=schedule)
    for _ in range(2):
        groups = policy.rollouts(PROMPTS, samples=4, sampling=SAMPLING)
        metrics = policy.update(groups, rewards_of(groups), rl.grpo())
        assert metrics["logprob_bits_differ"] == 0
    return policy.digest()


def test_weights_have_the_same_bits_on_one_two_and_four_chips_and_others_with_other_leaves():
    found = [weights_after_two_steps(chips) for chips in (1, 2, 4)]
    assert len({*found}) == 1
    assert weights_after_two_steps(2, leaf=4) != found[0]
