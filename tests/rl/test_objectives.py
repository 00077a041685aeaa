"""Objectives against their formulas in float64, with their gradients, and the weights of tokens by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.rl.objectives import Objective, dr_grpo, grpo, reinforce, rloo

# Ratios below, within and above the clip of 0.8 .. 1.28, for gains of both signs; the first text is on-policy.
RATIOS = np.asarray([[1.0, 1.0, 1.0], [0.5, 1.1, 1.9], [0.5, 1.1, 1.9]])
GAINS = np.asarray([0.7, 1.5, -2.0])
SAMPLED = np.asarray([[-0.1, -2.0, -5.0]] * 3)
AWAY = np.asarray([[0.0, 0.3, -0.4]] * 3)  # of the reference from the policy


def exact(clip, kl) -> tuple[np.ndarray, np.ndarray]:
    """Losses and their derivatives by the log-probabilities, in float64."""
    gain = GAINS[:, None]
    low, high = clip or (1.0, np.inf)
    clipped = np.clip(RATIOS, 1 - low, 1 + high)
    is_kept = RATIOS * gain <= clipped * gain
    losses = -np.where(is_kept, RATIOS * gain, clipped * gain)
    slopes = -np.where(is_kept, RATIOS * gain, 0.0)
    return losses + kl * (np.exp(AWAY) - 1 - AWAY), slopes + kl * (1 - np.exp(AWAY))


@pytest.mark.parametrize("clip", [None, (0.2, 0.28)])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_losses_and_their_gradients_are_those_of_the_formula(clip, kl):
    objective = Objective("centred", clip, "token", kl)
    logprobs = SAMPLED + np.log(RATIOS)
    given = [jnp.asarray(x, jnp.float32) for x in (logprobs, SAMPLED, GAINS)]
    reference = jnp.asarray(logprobs + AWAY, jnp.float32) if kl else None
    losses, slopes = exact(clip, kl)

    def total(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = objective.losses(logprobs, *given[1:], reference)
        return found.sum(), found

    (_, found), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(given[0])
    # Log-probabilities of size 5 are good to 5e-7, which ratios and gains multiply by 4.
    np.testing.assert_allclose(found, losses, rtol=0, atol=4e-6)
    np.testing.assert_allclose(gradient, slopes, rtol=0, atol=4e-6)


def test_policy_that_sampled_has_a_loss_without_distance_and_the_gradient_of_reinforce():
    logprobs = jnp.asarray(SAMPLED, jnp.float32)
    gains = jnp.asarray(GAINS, jnp.float32)
    for objective in (grpo(kl=0.5), reinforce(kl=0.5)):
        found = objective.losses(logprobs, logprobs, gains, logprobs)
        assert (found == -gains[:, None]).all()  # ratios are exactly 1, and the distance exactly 0
        slopes = jax.grad(lambda x, objective=objective: objective.losses(x, logprobs, gains, logprobs).sum())(logprobs)
        assert (slopes == -gains[:, None]).all()


def test_weights_of_tokens_by_hand():
    """Texts of 2, 0 (left out) and 6 tokens, of at most 10."""
    num_tokens = np.asarray([2, 0, 6])
    by_mean = {mean: Objective(mean=mean).weights(num_tokens, 10).tolist() for mean in ("token", "sequence", "constant")}
    of = np.float32
    assert by_mean == {
        "token": [of(1 / 8), 0, of(1 / 8)],
        "sequence": [of(1 / 4), 0, of(1 / 12)],
        "constant": [of(1 / 20), 0, of(1 / 20)],
    }
    assert Objective().weights(np.zeros(2, int), 10).tolist() == [0, 0]


def test_names_of_the_field():
    found = {fn.__name__: fn() for fn in (grpo, dr_grpo, rloo, reinforce)}
    assert found == {
        "grpo": Objective("normalised", (0.2, 0.2), "sequence", 0.0),
        "dr_grpo": Objective("centred", (0.2, 0.2), "constant", 0.0),
        "rloo": Objective("leave_one_out", None, "sequence", 0.0),
        "reinforce": Objective("plain", None, "sequence", 0.0),
    }
    assert [objective.compares for objective in found.values()] == [True, True, True, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantage": "best"}, "Objective.advantage must be one of"),
        ({"mean": "text"}, "Objective.mean must be one of"),
        *[({"clip": clip}, "Objective.clip must be") for clip in (0.2, (0.2,), (0.0, 0.2), (1.5, 0.2), (0.2, "a"), (0.2, -1))],
        *[({"kl": kl}, "Objective.kl must be a number of at least 0") for kl in (-0.1, float("nan"), "a", True)],
    ],
)
def test_objectives_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Objective(**fields)
