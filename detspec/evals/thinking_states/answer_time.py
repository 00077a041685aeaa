"""How long an answer takes: thoughts while reading beside a chain of thought after it, on one backbone and one machine."""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig, Schedule
from detspec.environment import chosen_schedule
from detspec.evals.thinking_states.prefill import guess_of, reading_counters
from detspec.evals.thinking_states.prompts import draw_problems, prompts_of, read_prompts, ready_state
from detspec.evals.thinking_states.turns import Prepare, time_by_turns
from detspec.generate.loop import fast_step, generate_state, run
from detspec.model.params import Params
from detspec.state import GenState
from detspec.thinking.reading import GuessFn
from detspec.train.problems.chunks import encode
from detspec.train.problems.parity import Parity
from detspec.train.problems.problem import Problem
from detspec.train.problems.task import tokenizer_of

MAX_TOKENS = {"thinking": 2}  # the answer and its end; a chain needs one for each operation, and "A:"


class Setting(NamedTuple):
    """One way to come to an answer."""

    arm: str  # "thinking" or "cot"
    source: str  # of guessed thoughts: "trivial", or "one chunk a pass" without guesses; "" for a chain of thought
    rows: int  # of a canonical pass
    window: int  # of verified decoding
    verified: bool  # canonical tokens; else ordinary decoding by the fast path

    @property
    def label(self) -> str:
        """A name for tables."""
        reads = {"": "", "trivial": ", trivial guesses"}.get(self.source, f", {self.source}")
        decodes = f"verified in windows of {self.window}" if self.verified else "ordinary decoding"
        return f"{self.arm}{reads}, {self.rows} rows, {decodes}"


def settings_of(batch: int, chunk: int) -> list[Setting]:
    """What is tried at one batch size; the fastest of each arm and kind of decoding is what counts.

    A sequential pass holds one chunk of each prompt. Answers of two tokens are drafted in windows of two.
    """
    rows = 64 if batch == 1 else batch * chunk
    found = []
    for verified in (True, False):
        found.append(Setting("thinking", "one chunk a pass", batch * chunk, 2, verified))
        found.append(Setting("thinking", "trivial", rows if batch == 1 else 2 * rows, 2, verified))
        found.append(Setting("cot", "", rows, 16, verified))
    return found


def answer_times(
    models: dict[str, Model], *, num_ops: int, batches: Sequence[int], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Every setting of both arms at each batch size, by turns within this process.

    Args:
        models: of the arms "thinking" and "cot", trained on `Parity`.
        num_ops: operations of the problems.
        batches: how many problems are answered together.
        repeats: rounds; medians are given, and how much slower a chain is in a round.
        seed: of the problems.

    Returns:
        For each the milliseconds from the prompts to the last token, those of them until the prompts are read, and the rest;
        new tokens, passes and rounds; the share of right answers.
    """
    found = []
    for batch in batches:
        problems = draw_problems(Parity(), num_ops=num_ops, number=batch, seed=seed)
        cases: dict[str, Prepare] = {}
        settings = settings_of(batch, models["thinking"].cfg.thinking.chunk)  # type: ignore[union-attr]
        for setting in settings:
            prompts = prompts_of(Parity(), problems, setting.arm)
            cases[f"{setting.label}: answer"] = _prepare(models[setting.arm], prompts, setting, num_ops, whole=True)
            cases[f"{setting.label}: reading"] = _prepare(models[setting.arm], prompts, setting, num_ops, whole=False)
        seconds = time_by_turns(cases, repeats)
        for setting in settings:
            whole, reading = (seconds[f"{setting.label}: {what}"] for what in ("answer", "reading"))
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
                    **counters(state, answer_ids(setting.arm, problems)),
                }
            )
    return found


def counters(state: GenState, answers: Sequence[int]) -> dict[str, float]:
    """New tokens of a row, and how many rows have their answer before their end; passes and rounds of a model that thinks."""
    tokens, committed = np.asarray(state.tokens), np.asarray(state.committed)
    prompt_len = np.asarray(state.sampling.prompt_len)
    right = [tokens[b, committed[b] - 2] == answer for b, answer in enumerate(answers)]
    read = {"rounds": 0.0, "passes": 0.0} if state.reading is None else reading_counters(state)
    return {"tokens": float(np.mean(committed - prompt_len)), "accuracy": float(np.mean(right)), **read}


def answer_ids(arm: str, problems: Sequence[Problem]) -> list[int]:
    """The token before the end of each right continuation."""
    return [one.continuation[-2] for one in encode(problems, tokenizer_of(Parity()), arm)]


@partial(jax.jit, static_argnames=("cfg", "schedule", "guess_fn"), donate_argnames=("state",))
def answer_ordinarily(
    params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule, guess_fn: GuessFn | None = None
) -> GenState:
    """Reads the prompts, then decodes by the fast path alone, for rows that did not ask for determinism."""
    state = read_prompts(params, cfg, state, schedule=schedule, guess_fn=guess_fn)
    step_fn = partial(fast_step, params, cfg, schedule=schedule)
    return run(state, step_fn, max_steps=jnp.int32(state.tokens.shape[1]), min_live=jnp.int32(1))[0]


def _prepare(model: Model, prompts: Sequence[Sequence[int]], setting: Setting, num_ops: int, *, whole: bool) -> Prepare:
    schedule = chosen_schedule(None, model.cfg).budget(setting.rows, setting.window)
    source_fn = guess_of(setting.source, schedule)
    max_tokens = MAX_TOKENS.get(setting.arm, num_ops + 4)
    call = read_prompts if not whole else generate_state if setting.verified else answer_ordinarily

    def prepare() -> Any:
        state = ready_state(model, prompts, max_tokens=max_tokens, schedule=schedule, deterministic=setting.verified)
        return lambda: call(model.params, model.cfg, state, schedule=schedule, guess_fn=source_fn)

    return prepare
