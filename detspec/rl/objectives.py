"""Objectives of policy gradients: what is maximised for each token of a text, and how tokens are averaged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import check_choice, is_number
from detspec.errors import InputError
from detspec.rl.advantages import ADVANTAGES

MEANS = ("token", "sequence", "constant")


@dataclasses.dataclass(frozen=True)
class Objective:
    """An objective of policy gradients: `min(ratio * A, clipped ratio * A) - kl * k3`, averaged over tokens.

    Attributes:
        advantage: "normalised", "centred", "leave_one_out" or "plain", see `detspec.rl.advantages`.
        clip: the ratio is clipped to `1 - low .. 1 + high`; None does not clip, and has the gradient of REINFORCE where the
            ratio is 1.
        mean: "token" gives each token of a step one weight (DAPO, arXiv 2503.14476), "sequence" each text (GRPO), "constant"
            divides by texts times `max_tokens` (Dr. GRPO).
        kl: weight of the distance from the reference, by the estimator k3 (Schulman 2020); 0 needs no reference.
    """

    advantage: str = "normalised"
    clip: tuple[float, float] | None = (0.2, 0.2)
    mean: str = "token"
    kl: float = 0.0

    def __post_init__(self) -> None:
        check_choice(self, "advantage", tuple(ADVANTAGES))
        check_choice(self, "mean", MEANS)
        clip = self.clip
        is_pair = isinstance(clip, tuple | list) and len(clip) == 2 and all(map(is_number, clip))
        if clip is not None and not (is_pair and 0 < clip[0] <= 1 and clip[1] > 0):
            raise InputError(f"Objective.clip must be (low, high) with 0 < low <= 1 and high > 0, or None, got {clip!r}")
        if not (is_number(self.kl) and self.kl >= 0):
            raise InputError(f"Objective.kl must be a number of at least 0, got {self.kl!r}")

    @property
    def compares(self) -> bool:
        """Whether texts of one prompt are compared, so that a group needs two."""
        return self.advantage != "plain"

    def weights(self, num_tokens: np.ndarray, max_tokens: int) -> np.ndarray:
        """The weight of each token of texts of `num_tokens [B]`, float32 `[B]`; texts with 0 tokens are left out."""
        counted = num_tokens > 0
        if self.mean == "token":
            return np.where(counted, 1 / max(1, num_tokens.sum()), 0).astype(np.float32)
        texts = max(1, counted.sum())
        each = np.maximum(num_tokens, 1) if self.mean == "sequence" else max_tokens
        return np.where(counted, 1 / (texts * each), 0).astype(np.float32)

    def losses(self, logprobs: jax.Array, sampled: jax.Array, advantages: jax.Array, reference: jax.Array | None) -> jax.Array:
        """The loss of each token, float32 `[B, T]`.

        Args:
            logprobs: `[B, T]`, of the policy, differentiable.
            sampled: `[B, T]`, of the policy that sampled the tokens.
            advantages: `[B]`.
            reference: `[B, T]`, of the reference; None without.
        """
        gain = advantages[:, None]
        ratio = jnp.exp(logprobs - sampled)
        objective = ratio * gain
        if self.clip is not None:
            low, high = self.clip
            objective = jnp.minimum(objective, jnp.clip(ratio, np.float32(1 - low), np.float32(1 + high)) * gain)
        if reference is None:
            return -objective
        away = reference - logprobs
        return np.float32(self.kl) * (jnp.exp(away) - 1 - away) - objective


def grpo(*, clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.0, mean: str = "sequence") -> Objective:
    """GRPO (DeepSeekMath, arXiv 2402.03300); with `mean="token"` and `clip=(0.2, 0.28)` as in DAPO."""
    return Objective("normalised", clip, mean, kl)


def dr_grpo(*, clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.0) -> Objective:
    """Dr. GRPO (arXiv 2503.20783): advantages are not divided by a deviation, nor losses by lengths."""
    return Objective("centred", clip, "constant", kl)


def rloo(*, kl: float = 0.0) -> Objective:
    """REINFORCE with the mean of the other texts as the baseline (arXiv 2402.14740)."""
    return Objective("leave_one_out", None, "sequence", kl)


def reinforce(*, kl: float = 0.0) -> Objective:
    """REINFORCE without a baseline (Williams 1992)."""
    return Objective("plain", None, "sequence", kl)


GRPO = grpo()
