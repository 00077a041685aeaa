"""A prompt read with thoughts, recorded pass by pass.

The functions are those of the engine (`think_pass`, then the program of `ds.generate`), called one pass at a time, so that
the input and the result of each pass can be looked at.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.intake import tokens_of
from detspec.environment import default_schedule
from detspec.errors import InputError
from detspec.generation.init import start_state
from detspec.generation.loop import generate_state
from detspec.held import Jitted
from detspec.sampling_params import SamplingParams
from detspec.state import GenState
from detspec.thinking.blocks import thinking_of
from detspec.thinking.drafts import DRAFTED
from detspec.thinking.reading import reading_of
from detspec.thinking.think_prompt import think_pass
from detspec.thinking.thoughts import thought_lists
from detspec.traces.record_windows import Prompt, token_texts
from detspec.traces.thoughts import ThoughtPass, ThoughtText, ThoughtTrace

DRAFT_NAMES = {"none": "all thoughts drafted as trivial", "self": "thoughts drafted by a cheap pass that reads ahead"}


def run_thought_trace(model: Model, prompt: Prompt, sampling: SamplingParams, *, think: str = "none") -> ThoughtTrace:
    """Reads `prompt` with thoughts, records every pass, and generates the answer.

    Args:
        model: weights that think, and tokenizer.
        prompt: text or token ids, more than one chunk of them.
        sampling: sampling parameters of the answer.
        think: how thoughts are drafted, one of `detspec.thinking.drafts.DRAFTED`.

    Raises:
        InputError: the model does not think, the prompt is unsound or no longer than a chunk, or there is no such source.
    """
    cfg = model.cfg
    thinking = thinking_of(cfg)
    ids = tokens_of(model, prompt)
    C = thinking.chunk
    if 0 < len(ids) <= C:
        raise InputError(
            f"the prompt has {len(ids)} tokens, and a thought follows every chunk of {C} but the last, so there is none to "
            f"trace: give a prompt of at least {C + 1} tokens"
        )
    schedule = default_schedule(cfg)
    if think not in DRAFTED:
        raise InputError(f"there is no way to draft thoughts called {think!r}: choose one of {tuple(DRAFTED)}")
    draft_fn = DRAFTED[think]
    max_len = max(len(ids) + sampling.max_tokens, schedule.budget.window)
    if max_len > cfg.max_position:
        raise InputError(f"prompt and max_tokens need {max_len} positions, the model was made for {cfg.max_position}")
    asked = dataclasses.replace(sampling, thinking=True)
    state = start_state(cfg, [ids], [asked], eos_ids=model.eos_ids, max_len=max_len, schedule=schedule)
    state = jax.jit(draft_fn, static_argnames=("cfg", "schedule"))(model.params, cfg, state, schedule)
    passes: list[ThoughtPass] = []
    before = _reached(state)
    while before.read < before.end:
        state = _pass(model.params, cfg, state, schedule=schedule)
        after = _reached(state)
        passes.append(_pass_between(model, before, after, most=schedule.budget.rows // C))
        before = after
    state = generate_state(model.params, cfg, state, schedule=schedule)
    tokens, committed = jax.device_get((state.tokens[0], state.committed[0]))
    return ThoughtTrace(
        chunks=tuple(token_texts(model, ids[start : start + C]) for start in range(0, len(ids), C)),
        passes=tuple(passes),
        answer=token_texts(model, [token for token in tokens[len(ids) : committed].tolist() if token not in model.eos_ids]),
        chunk=C,
        layers=(thinking.in_layer, thinking.out_layer, cfg.num_layers),
        title=f"model {model.digest[:12]}, {DRAFT_NAMES[think]}",
    )


_pass = Jitted(think_pass, static_argnames=("cfg", "schedule"), donate_argnames=("state",))


class ReachedChunks(NamedTuple):
    """The reading of a prompt, so far."""

    read: int  # chunks whose thoughts are committed
    end: int  # chunks that are thought about
    thoughts: np.ndarray  # [X, M] int32, committed below `read`, drafted from there on
    accepted: int  # drafted thoughts that were accepted
    length: int  # valid cache slots


def _reached(state: GenState) -> ReachedChunks:
    """Copies how far the only sequence of `state` is."""
    reading = reading_of(state)
    facts = reading.read, reading.end, reading.thoughts
    read, end, thoughts = jax.device_get(tuple(fact[0] for fact in facts))
    return ReachedChunks(
        int(read), int(end), thoughts, int(state.counters.num_accepted_thoughts[0]), int(state.cache.length[0])
    )


def _pass_between(model: Model, before: ReachedChunks, after: ReachedChunks, *, most: int) -> ThoughtPass:
    """The pass that led from `before` to `after`; it had room for `most` chunks."""
    return ThoughtPass(
        first=before.read,
        drafts=_thoughts(model, before.thoughts[before.read : min(before.end, before.read + most)]),
        accepted=after.accepted - before.accepted,
        thoughts=_thoughts(model, after.thoughts[before.read : after.read]),
        length=after.length,
    )


def _thoughts(model: Model, thoughts: np.ndarray) -> tuple[ThoughtText, ...]:
    """`[n, M]` token ids as text."""
    end_id = thinking_of(model.cfg).end_id
    return tuple(
        ThoughtText(token_texts(model, [token for token in tokens if token != end_id]), ended=end_id in tokens)
        for tokens in thought_lists(thoughts)
    )
