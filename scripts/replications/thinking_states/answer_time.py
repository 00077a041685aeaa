"""The time to an answer: thoughts while reading compared with a chain of thought after it, on one backbone and machine."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from detspec.checkpoint.load import Model
from detspec.environment import chosen_schedule
from detspec.state import GenState
from detspec.thinking.blocks import thinking_of
from detspec.train.problems.chunks import encode
from detspec.train.problems.problem import Problem
from detspec.train.problems.tasks import Parity, Task, tokenizer_of
from scripts.replications.thinking_states.prefill import reading_counters
from scripts.replications.thinking_states.prompts import decode, draw_problems, prompts_of, read_prompts, ready_state
from scripts.replications.turns import Prepare, time_by_turns

PREFILL_WINDOW = 16  # for a prompt that is read without thoughts


class Setting(NamedTuple):
    """A way to an answer; all decode one canonical token per row and pass."""

    arm: str  # "thinking", "cot" or "no_cot"
    chunks: int  # chunks of a prompt in a reading pass, with trivial drafts from the second on; 0 without thoughts
    rows: int  # rows of a reading pass

    @property
    def label(self) -> str:
        """A name for tables."""
        reads = {0: "", 1: ", one chunk a pass"}.get(self.chunks, f", {self.chunks} chunks a pass, trivial guesses")
        return f"{self.arm}{reads}, {self.rows} rows"


def settings_of(batch: int, chunk: int) -> list[Setting]:
    """The settings of one batch size; the fastest of each arm counts."""
    thinking = [Setting("thinking", chunks, chunks * batch * chunk) for chunks in (1, 2)]
    return [*thinking, Setting("cot", 0, max(batch * chunk, 64))]


def answer_times(
    thinking: Model, cot: Model, *, num_ops: int, batches: Sequence[int], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Every setting of both arms at each batch size, in turn within this process.

    Args:
        thinking, cot: models of the two arms, trained on `Parity`.
        num_ops: operations of a problem.
        batches: how many problems are answered together.
        repeats: rounds; the result has medians.
        seed: problems are drawn from it.

    Returns:
        For each setting the milliseconds from the prompts to the last token, and their split into reading and decoding; the
        numbers of new tokens, passes and rounds; the share of right answers.
    """
    models = {"thinking": thinking, "cot": cot}
    found = []
    for batch in batches:
        problems = draw_problems(Parity(), num_ops=num_ops, number=batch, seed=seed)
        cases: dict[str, Prepare] = {}
        settings = settings_of(batch, thinking_of(thinking.cfg).chunk)
        for setting in settings:
            prompts = prompts_of(Parity(), problems, setting.arm)
            max_tokens = max(len(ids) for ids in continuations_of(Parity(), problems, setting.arm))
            for until in ("answer", "reading"):
                cases[f"{setting.label}: {until}"] = prepare(models[setting.arm], prompts, setting, max_tokens, until)
        seconds = time_by_turns(cases, repeats)
        for setting in settings:
            whole, reading = (seconds[f"{setting.label}: {until}"] for until in ("answer", "reading"))
            state = cases[f"{setting.label}: answer"]()()
            found.append(
                {
                    "batch": batch,
                    **setting._asdict(),
                    "label": setting.label,
                    "ms": 1e3 * median(whole),
                    "least_ms": 1e3 * min(whole),
                    "reading_ms": 1e3 * median(reading),
                    "decoding_ms": 1e3 * median(a - b for a, b in zip(whole, reading, strict=True)),
                    **counters(state, [ids[-2] for ids in continuations_of(Parity(), problems, setting.arm)]),
                }
            )
    return found


def counters(state: GenState, answers: Sequence[int]) -> dict[str, float]:
    """Means over rows: new tokens, right answers, and for a model that thinks rounds and passes."""
    tokens = np.asarray(state.tokens)
    committed = np.asarray(state.committed)
    prompt_len = np.asarray(state.sampling.prompt_len)
    right = [tokens[b, committed[b] - 2] == answer for b, answer in enumerate(answers)]
    read = {"rounds": 0.0, "passes": 0.0} if state.riders.reader is None else reading_counters(state)
    return {"tokens": float(np.mean(committed - prompt_len)), "accuracy": float(np.mean(right)), **read}


def continuations_of(task: Task, problems: Sequence[Problem], arm: str) -> list[list[int]]:
    """Token ids of the right continuations, which end with the answer and the end."""
    return [one.continuation for one in encode(problems, tokenizer_of(task), arm)]


def prepare(model: Model, prompts: Sequence[Sequence[int]], setting: Setting, max_tokens: int, until: str) -> Prepare:
    """Returns a maker of a state of `prompts`, and the call that brings it to its "answer", or to the end of its "reading"."""
    schedule = chosen_schedule(None, model.cfg)
    window = thinking_of(model.cfg).chunk if setting.chunks else PREFILL_WINDOW
    reads = schedule.with_budget(setting.rows, window)
    decodes = schedule.with_budget(len(prompts), 1)

    def ready() -> Any:
        state = ready_state(model, prompts, max_tokens=max_tokens, schedule=reads)

        def call() -> GenState:
            read = read_prompts(model.params, model.cfg, state, schedule=reads)
            return decode(model.params, model.cfg, read, schedule=decodes) if until == "answer" else read

        return call

    return ready
