"""Answers to the same problems by many models, in turn: right answers, dependent passes, and time compared with a chain."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from detspec.checkpoint.load import Model
from detspec.train.problems.tasks import Arithmetic, Task
from detspec.train.problems.two_hop import TwoHop
from scripts.replications.thinking_states.answer_time import PREFILL_WINDOW, Setting, continuations_of, counters, prepare
from scripts.replications.thinking_states.prompts import draw_problems, prompts_of
from scripts.replications.turns import Prepare, time_by_turns

ASKED: dict[str, Task] = {"arithmetic": Arithmetic(), "two_hop": TwoHop()}
CHAIN = "cot"  # the arm that the others are compared with


def answer_speeds(
    *models: Model, task: str, arms: Sequence[str], num_ops: int, batch: int, repeats: int, seed: int
) -> list[dict[str, Any]]:
    """The time to the answers of `batch` problems, for each of `models`.

    Args:
        models: trained on the problems of `task`.
        task: "arithmetic" or "two_hop".
        arms: the arm of each model; one of them is "cot".
        num_ops: operations of a problem.
        batch: problems that are answered together.
        repeats: rounds; the result has medians.
        seed: problems are drawn from it.

    Returns:
        For each model "ms", its share of right answers, the passes that depend on each other (reading chunk by chunk, then one
        for each new token) and the speed-up over the chain of thought, a median of ratios within a round.
    """
    asked = ASKED[task]
    problems = draw_problems(asked, num_ops=num_ops, number=batch, seed=seed)
    cases: dict[str, Prepare] = {}
    for place, (model, arm) in enumerate(zip(models, arms, strict=True)):
        room = max(map(len, continuations_of(asked, problems, arm)))
        setting = setting_of(model, asked, arm, batch)
        cases[f"{place}"] = prepare(model, prompts_of(asked, problems, arm), setting, room, "answer")
    seconds = time_by_turns(cases, repeats)
    chain = seconds[f"{list(arms).index(CHAIN)}"]
    found = []
    for (place, taken), arm in zip(seconds.items(), arms, strict=True):
        counted = counters(cases[place]()(), [ids[-2] for ids in continuations_of(asked, problems, arm)])
        found.append(
            {
                "arm": arm,
                "ms": 1e3 * median(taken),
                "speedup": median(slow / fast for slow, fast in zip(chain, taken, strict=True)),
                "dependent": max(counted["passes"], 1) + counted["tokens"],
                **counted,
            }
        )
    return found


def setting_of(model: Model, task: Task, arm: str, batch: int) -> Setting:
    """Setting with a chunk of each prompt a pass for a model that thinks; others read at least 16 positions of each."""
    if model.cfg.thinking is not None:
        return Setting(arm, 1, batch * model.cfg.thinking.chunk)
    return Setting(arm, 0, max(batch * PREFILL_WINDOW, 64))
