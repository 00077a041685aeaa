"""Speculative prefill: rounds, passes and times of each source of drafts, by sparsity.

sequential pass    one chunk of each row a pass, nothing drafted
trivial            all thoughts are drafted as trivial (the published speculation)
sequential         a cheap pass reads ahead, chunk by chunk
recorded           right drafts: the thoughts of an earlier reading of the same prompt
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import jax
import numpy as np

from detspec.checkpoint.load import Model
from detspec.environment import chosen_schedule
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.thinking.blocks import thinking_of
from detspec.thinking.reading import reading_of
from detspec.train.problems.tasks import Parity
from scripts.replications.thinking_states.prompts import draft_thoughts, draw_problems, prompts_of, read_prompts, ready_state
from scripts.replications.turns import Prepare, time_by_turns

SOURCES = ("trivial", "sequential", "recorded")


def rounds_by_sparsity(
    model: Model, *, fillers: Sequence[float], num_ops: int, num_problems: int, seed: int
) -> list[dict[str, Any]]:
    """Means over `num_problems` prompts, read one at a time, for each share of fillers.

    Counted are a prompt's chunks and its thoughts that are not trivial, and for each of `SOURCES` the rounds (one more than
    wrong drafts), the passes, and the share of right drafts.
    """
    schedule = chosen_schedule(None, model.cfg)
    found = []
    for filler in fillers:
        problems = draw_problems(Parity(filler=filler), num_ops=num_ops, number=num_problems, seed=seed)
        prompts = prompts_of(Parity(), problems, "thinking")
        counted: dict[str, list[dict[str, float]]] = {source: [] for source in SOURCES}
        chunks = []
        thoughts = []
        for prompt in prompts:
            recorded = None
            for source in SOURCES:
                state = read_by(model, [prompt], source, schedule=schedule, recorded=recorded)()
                counted[source].append(reading_counters(state))
                recorded = reading_of(state).thoughts
            chunks.append(int(reading_of(state).end[0]))
            thoughts.append(count_thoughts(state))
        found.append(
            {
                "filler": filler,
                "chunks": float(np.mean(chunks)),
                "thoughts": float(np.mean(thoughts)),
                "sources": {source: means(each) for source, each in counted.items()},
            }
        )
    return found


def prefill_times(
    model: Model, *, filler: float, num_ops: int, rows: Mapping[int, Sequence[int]], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Milliseconds of reading long sparse prompts, in turn, for each number of prompts and of rows in a pass.

    Args:
        model: one that thinks.
        filler, num_ops: the problems are `Parity(filler)` of `num_ops` operations.
        rows: for each batch size, the rows of a pass that speculation is tried with.
        repeats: rounds; the result has medians.
        seed: problems are drawn from it.
    """
    found = []
    for batch, budgets in rows.items():
        problems = draw_problems(Parity(filler=filler), num_ops=num_ops, number=batch, seed=seed)
        prompts = prompts_of(Parity(), problems, "thinking")
        one_chunk = batch * thinking_of(model.cfg).chunk
        settings = [("one chunk a pass", one_chunk), *((source, budget) for source in SOURCES for budget in budgets)]
        recorded = reading_of(read_by(model, prompts, "trivial", schedule=of_rows(model, budgets[0]))()).thoughts
        readers = {
            f"{source} {budget}": _prepare(model, prompts, source, of_rows(model, budget), recorded)
            for source, budget in settings
        }
        seconds = time_by_turns(readers, repeats)
        base = seconds[f"one chunk a pass {one_chunk}"]
        for source, budget in settings:
            taken = seconds[f"{source} {budget}"]
            found.append(
                {
                    "batch": batch,
                    "source": source,
                    "rows": budget,
                    "ms": 1e3 * median(taken),
                    "speedup": median(slow / fast for slow, fast in zip(base, taken, strict=True)),
                    **reading_counters(read_by(model, prompts, source, schedule=of_rows(model, budget), recorded=recorded)()),
                }
            )
    return found


def of_rows(model: Model, rows: int) -> Schedule:
    """The device's schedule with a budget of `rows`, in windows of a chunk."""
    return chosen_schedule(None, model.cfg).with_budget(rows, min(rows, thinking_of(model.cfg).chunk))


def read_by(
    model: Model, prompts: Sequence[Sequence[int]], source: str, *, schedule: Schedule, recorded: jax.Array | None = None
) -> Any:
    """A function that reads `prompts` with drafts of `source` and returns the state; what it starts from is made here."""
    given = recorded if source == "recorded" else None
    state = ready_state(model, prompts, max_tokens=1, schedule=schedule, thoughts=given)
    # The drafts that a state begins with are trivial. Reading ahead takes no rows of the pass: one program for all budgets.
    ahead = of_rows(model, thinking_of(model.cfg).chunk) if source == "sequential" else None

    def call() -> GenState:
        drafted = state
        if ahead is not None:
            drafted = draft_thoughts(model.params, model.cfg, state, schedule=ahead, source="self")
        return read_prompts(model.params, model.cfg, drafted, schedule=schedule)

    return call


def reading_counters(state: GenState) -> dict[str, float]:
    """Rounds, passes and the share of right drafts of a state that has read, means over its rows."""
    counters = jax.device_get(state.counters)
    return {
        "rounds": float(np.mean(counters.num_rejected_thoughts + 1)),
        "passes": float(np.mean(counters.num_read_passes)),
        "right": float(np.sum(counters.num_accepted_thoughts) / max(np.sum(counters.num_draft_thoughts), 1)),
    }


def count_thoughts(state: GenState) -> int:
    """Thoughts of row 0 that are not trivial."""
    reading = reading_of(state)
    return int(np.sum(np.asarray(reading.thoughts[0, : int(reading.end[0]), 0]) != reading.end_id))


def means(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each entry."""
    return {name: float(np.mean([one[name] for one in each])) for name in each[0]}


def _prepare(model: Model, prompts: Sequence[Sequence[int]], source: str, schedule: Schedule, recorded: jax.Array) -> Prepare:
    return lambda: read_by(model, prompts, source, schedule=schedule, recorded=recorded)
