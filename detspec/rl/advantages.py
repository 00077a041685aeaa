"""Advantages of texts from their rewards, within the group of one prompt; float64 on the host."""

from collections.abc import Callable, Sequence

import numpy as np

from detspec.errors import InputError, shown
from detspec.plain import plain_list

AdvantageFn = Callable[[np.ndarray], np.ndarray]  # rewards [n] -> advantages [n]
EPSILON = 1e-6  # added to a deviation before anything is divided by it


def normalised(rewards: np.ndarray) -> np.ndarray:
    """The distance of each reward from their mean, over their deviation (GRPO: DeepSeekMath, arXiv 2402.03300)."""
    if (rewards == rewards[0]).all():  # rounding would leave a deviation that is not 0
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


def centred(rewards: np.ndarray) -> np.ndarray:
    """The distance of each reward from their mean (Dr. GRPO: arXiv 2503.20783)."""
    return np.zeros_like(rewards) if (rewards == rewards[0]).all() else rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """The distance of each reward from the mean of the others (RLOO: Ahmadian et al. 2024, arXiv 2402.14740)."""
    n = len(rewards)
    return np.zeros_like(rewards) if (rewards == rewards[0]).all() else (rewards - rewards.mean()) * n / (n - 1)


def plain(rewards: np.ndarray) -> np.ndarray:
    """The rewards themselves (REINFORCE: Williams 1992)."""
    return rewards


ADVANTAGES: dict[str, AdvantageFn] = {
    "normalised": normalised,
    "centred": centred,
    "leave_one_out": leave_one_out,
    "plain": plain,
}


def advantages_of(groups: Sequence[Sequence[float | None]], kind: str) -> list[np.ndarray]:
    """The advantages `kind` of each group of rewards, float64; nan for a text whose reward is None.

    Such a text is left out of the baseline of its group, too. A group with less than two rewards tells nothing where they are
    compared: its advantages are 0.
    """
    found = []
    for group in groups:
        rewards = np.asarray([np.nan if reward is None else reward for reward in group], np.float64)
        counted = ~np.isnan(rewards)
        advantages = np.full(len(rewards), np.nan)
        if kind == "plain" or counted.sum() >= 2:
            advantages[counted] = ADVANTAGES[kind](rewards[counted])
        else:
            advantages[counted] = 0.0
        found.append(advantages)
    return found


def checked_rewards(groups: Sequence[Sequence[str]], rewards: object) -> list[list[float | None]]:
    """`rewards` as floats, one for each of the `groups` of ids; None leaves a text out.

    Raises `InputError`, with the id of the text, for anything else.
    """
    sentence = "rewards must be a list for each group, with a number or None for each text"
    listed = [plain_list(group, sentence) for group in plain_list(rewards, sentence)]
    given = [len(group) for group in listed]
    if given != [len(group) for group in groups]:
        raise InputError(f"rewards must be one for each text, in {[len(group) for group in groups]} a group, got {given}")
    return [
        [_checked(id, reward) for id, reward in zip(ids, group, strict=True)] for ids, group in zip(groups, listed, strict=True)
    ]


def _checked(id: str, reward: object) -> float | None:
    if reward is None:
        return None
    is_number = isinstance(reward, int | float | np.number) and not isinstance(reward, bool | np.bool_)
    if not is_number or not np.isfinite(float(reward)):  # type: ignore[arg-type]
        raise InputError(f"the reward of {id!r} must be a finite number, or None to leave the text out, got {shown(reward)}")
    return float(reward)  # type: ignore[arg-type]
