"""Real windows of draft, verify and commit, recorded step by step.

The function is the engine's (`dvr_step`), called one step at a time, so that its draft and its verdict can be read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.draft.self_draft import SELF
from detspec.draft.source import Drafter, DraftParams, DraftSource, draft_fn
from detspec.draft.table import source_of
from detspec.engine.intake import tokens_of
from detspec.engine.policy import Drafting, canonical_plans
from detspec.environment import default_schedule
from detspec.errors import InputError
from detspec.generation.init import start_state
from detspec.generation.loop import Step, dvr_step
from detspec.generation.prefill import prefill
from detspec.held import Jitted
from detspec.model.params import Params
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.state import Draft, GenState, Verified
from detspec.traces.windows import Trace, TraceWindow

Prompt = str | Sequence[int]

NAMES = {"self": "its fast path", "int8": "its weights in int8", "ngram": "prompt lookup"}  # of drafts, in titles


def run_trace(
    model: Model,
    prompt: Prompt,
    sampling: SamplingParams,
    *,
    window: int = 4,
    max_tokens: int = 32,
    other_prompts: Sequence[Prompt] = (),
    drafter: Drafter | None = None,
) -> Trace:
    """Generates from `prompt` and records every window.

    T0 of the first window is the prompt's last token: prefill leaves its keys and values to the window.

    Args:
        model: weights and tokenizer.
        prompt: text or token ids.
        sampling: must be deterministic; its `max_tokens` is not used.
        window: `W`, one more than the drafted tokens; a power of two of at least 2.
        max_tokens: most new tokens.
        other_prompts: further requests in the batch. They may change what is drafted, but not what is committed.
        drafter: the draft source; the model's own fast path if None.

    Raises:
        InputError: a prompt or `window` is invalid, or the request is not deterministic.
    """
    prompts = [prompt, *other_prompts]
    return trace_batch(model, prompts, sampling, window=window, max_tokens=max_tokens, drafter=drafter)[0]


def find_rollback(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    temperature: float = 1.0,
    window: int = 4,
    max_tokens: int = 96,
    num_rows: int = 16,
    num_batches: int = 2,
) -> Trace:
    """The first real trace with both kinds of window, without and with a rollback, in a fixed order of drafts and seeds.

    1. The model's own fast path drafts `num_batches` batches of `num_rows` requests, with `prompts` in turn. Its drafts are
       rarely rejected, on a CPU one in 10^4 to 10^5.
    2. The same batches are drafted by its weights in int8. More drafts are rejected; what is committed is the same.

    The title says which draft it was. If no draft was rejected, the trace returned has no rollback: check
    `any(window.rolled_back for window in trace.windows)`.

    Args:
        model: weights and tokenizer.
        prompts: texts or token ids; those of a batch take turns.
        temperature: divides the logits; drafts are rejected more often at high ones.
        window: `W`, one more than the drafted tokens; a power of two of at least 2.
        max_tokens: most new tokens of a request.
        num_rows: requests in a batch, each with a seed of its own.
        num_batches: batches tried with each draft.

    Raises:
        InputError: a prompt or `window` is invalid; there is no prompt, row or batch.
    """
    if len(prompts) == 0 or num_rows < 1 or num_batches < 1:
        raise InputError("find_rollback needs at least one prompt, one row and one batch")
    requests = [prompts[row % len(prompts)] for row in range(num_rows)]
    for draft in ("self", "int8"):
        drafter = drafter_of(model, draft)
        for batch in range(num_batches):
            sampling = SamplingParams(temperature=temperature, seed=batch * num_rows)
            traces = trace_batch(model, requests, sampling, window=window, max_tokens=max_tokens, drafter=drafter)
            both = [trace for trace in traces if {w.rolled_back for w in trace.windows if w.drafted} == {True, False}]
            if both:  # prefer one whose first rollback keeps some drafted tokens
                return max(both, key=lambda trace: next(w.accepted > 0 for w in trace.windows if w.rolled_back))
    return traces[0]


def drafter_of(model: Model, name: str) -> Drafter:
    """The draft source called `name`, with weights that follow from the model's; `InputError` if there is none of that name."""
    source = source_of(name)
    return Drafter(source, () if source.derive is None else source.derive(model.params, model.cfg))


def trace_batch(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    window: int,
    max_tokens: int,
    drafter: Drafter | None = None,
) -> list[Trace]:
    """Generates from all `prompts` in one batch and records every window of each; see `run_trace`.

    Prompt `b` has the seed `sampling.seed + b`, so that equal prompts give different texts.
    """
    source, draft_params = drafter or Drafter(SELF)
    state, each, canonical = _start(model, prompts, sampling, window, max_tokens)
    state = state.replace(draft=source.init(model.cfg, canonical, state))
    first = _reached(state)
    windows: list[list[TraceWindow]] = [[] for _ in prompts]
    before = first
    while before.live.any():
        state, step = _step(model.params, draft_params, model.cfg, state, schedule=canonical, source=source)
        after = _reached(state)
        draft, verified = jax.device_get(step)
        for b in np.flatnonzero(before.live).tolist():
            windows[b].append(_window(model, b, before, draft, verified, after))
        before = after
    title = f"model {model.digest[:12]}, drafted by {NAMES.get(source.name, source.name)}, temperature {sampling.temperature:g}"
    return [
        Trace(
            prompt=token_texts(model, first.tokens[b, : first.committed[b] - 1]),
            windows=tuple(windows[b]),
            num_others=len(prompts) - 1,
            title=f"{title}, seed {params.seed}",
        )
        for b, params in enumerate(each)
    ]


def _start(
    model: Model, prompts: Sequence[Prompt], sampling: SamplingParams, window: int, max_tokens: int
) -> tuple[GenState, list[SamplingParams], Schedule]:
    """The prefilled state, the sampling of each request, and the schedule of the windows, which is the engine's."""
    if not sampling.deterministic:
        raise InputError("only a deterministic request has windows to trace, got deterministic=False")
    if window < 2 or window & (window - 1):
        raise InputError(f"the window must be a power of two of at least 2, got {window!r}")
    ids = [tokens_of(model, prompt) for prompt in prompts]
    each = [replace(sampling, max_tokens=max_tokens, seed=(sampling.seed + b) % 2**32) for b in range(len(ids))]
    schedule = default_schedule(model.cfg)
    max_len = max(max(len(prompt) for prompt in ids) + max_tokens, schedule.budget.window, window)
    if max_len > model.cfg.max_position:
        raise InputError(f"prompt and max_tokens need {max_len} positions, the model was made for {model.cfg.max_position}")
    canonical = schedule.with_budget(
        canonical_plans(len(ids), schedule.budget.rows, Drafting("self", window))[0].budget.rows, window
    )
    state = start_state(model.cfg, ids, each, eos_ids=model.eos_ids, max_len=max_len, schedule=schedule)
    return _prefilled(model.params, model.cfg, state, schedule=schedule), each, canonical


_prefilled = Jitted(prefill, static_argnames=("cfg", "schedule"), donate_argnames=("state",))


@partial(Jitted, static_argnames=("cfg", "schedule", "source"), donate_argnames=("state",))
def _step(
    params: Params, draft_params: DraftParams, cfg: ModelConfig, state: GenState, *, schedule: Schedule, source: DraftSource
) -> tuple[GenState, Step]:
    """Takes a `dvr_step`; returns its draft and its verdict, too, without the caches."""
    drafted_by = draft_fn(Drafter(source, draft_params), schedule)
    state, step = dvr_step(params, cfg, state, draft_fn=drafted_by, schedule=schedule)
    return state, Step(step.draft.replace(cache=None), step.verified.replace(cache=None))


class Reached(NamedTuple):
    """Tokens and lengths of all sequences so far, in numpy."""

    live: np.ndarray  # [B] bool
    tokens: np.ndarray  # [B, max_len] int32
    committed: np.ndarray  # [B] int32
    length: np.ndarray  # [B] int32, valid cache slots


def _reached(state: GenState) -> Reached:
    """Copies how far the sequences of `state` are."""
    return Reached(*jax.device_get((state.live, state.tokens, state.committed, state.cache.length)))


def _window(model: Model, b: int, before: Reached, draft: Draft, verified: Verified, after: Reached) -> TraceWindow:
    """The window of sequence `b` that one step made."""
    length = int(before.length[b])
    committed = int(before.committed[b])
    num_drafted = int(draft.count[b])
    return TraceWindow(
        start=committed - 1,
        last_token=token_text(model, int(before.tokens[b, committed - 1])),
        drafted=token_texts(model, draft.tokens[b, :num_drafted]),
        targets=token_texts(model, verified.targets[b, : num_drafted + 1]),
        accepted=int(verified.accepted[b]),
        committed=token_texts(model, after.tokens[b, committed : int(after.committed[b])]),
        length_before=length,
        length_drafted=length + num_drafted,
        length_after=int(after.length[b]),
    )


def token_text(model: Model, token: int) -> str:
    """Returns a token as text; its id in angle brackets if it has no text, as special tokens have none."""
    text = "" if model.tokenizer is None else model.tokenizer.decode([token])
    return text or f"<{token}>"


def token_texts(model: Model, tokens: Iterable[int]) -> tuple[str, ...]:
    """Returns each of `tokens` as text."""
    return tuple(token_text(model, int(token)) for token in tokens)
