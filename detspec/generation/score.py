"""Given text through the canonical pass: the log-probability of every token, and what the pass would have chosen."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.environment import chosen_schedule
from detspec.errors import InputError
from detspec.generation.checks import DIFFERENTIABLE, is_traced, listed_prompts
from detspec.generation.init import start_state
from detspec.held import Jitted
from detspec.mesh import check_one_chip
from detspec.model.params import Params
from detspec.model.transformer import forward, logits_fn
from detspec.ops.collectives import share_rows
from detspec.passes import Spans, run_passes, spans
from detspec.plain import plain_ids
from detspec.riders.rider import TextsFn
from detspec.sampler import choose_fn, likeliest, numbers_of, reported_logits
from detspec.sampling_params import MAX_LOGPROBS, SamplingParams
from detspec.schedule import Schedule
from detspec.state import GenState, Windows
from detspec.struct import Struct


class Asked(NamedTuple):
    """Facts that passes over given text must find."""

    processing: bool  # some texts ask for logits processing
    choose: bool  # the token that each sequence's sampling parameters choose, at every position
    top_k: int  # how many of the likeliest tokens, at every position

    @classmethod
    def likeliest(cls, processing: bool, most: int, vocab_size: int) -> "Asked":
        """At least the `most` likeliest tokens of texts that are given; few programs do for all numbers."""
        return cls(processing, choose=False, top_k=min(1 if most <= 1 else MAX_LOGPROBS, vocab_size))


class Replayed(Struct):
    """Verdict of the canonical pass on given text. Entry `p` is about the token at position `p`, read at position `p - 1`.

    Entries that no pass has read, or that were not wanted, are 0: position 0 is, and positions up to the start of the replay.
    """

    logprobs: jax.Array  # [B, T] float32, of the given token: raw in the prompt, after it raw or as asked
    top_ids: jax.Array  # [B, T, k] int32, likeliest tokens of what is reported, the lower id first among equals
    top_logprobs: jax.Array  # [B, T, k] float32
    targets: jax.Array | None  # [B, T] int32, the token that its sampling parameters choose; None if not asked for
    target_logprobs: jax.Array | None  # [B, T] float32, log-probability of the target, raw or processed as asked


def score(
    params: Params,
    cfg: ModelConfig,
    sequences: Sequence[Sequence[int]],
    *,
    schedule: Schedule | None = None,
    max_len: int | None = None,
) -> list[np.ndarray]:
    """Log-probabilities of given texts, with the bits that generation reports for the tokens it commits.

    With XLA's products of floats nothing certifies the equality, see `generate`.

    The texts are read without thoughts, as generation with `SamplingParams(thinking=False)` reads them.

    Args:
        params: weights, as `Model.params`.
        cfg: shape of the model, as `Model.cfg`.
        sequences: token ids of `B` texts of any lengths; the bits do not depend on which texts are scored together.
        schedule: numerics and budget of the canonical pass; the device's default if None.
        max_len: positions of a sequence, at least one more than the longest text; by default just enough. Calls with equal
            `B` and `max_len` share one compiled program.

    Returns:
        For each text float32 `[len(text)]`: the raw log-probability of each token given those before it, nan for the first.

    Raises:
        InputError: a text is empty, holds an id outside the vocabulary, or does not fit `max_len`; the weights lie on several
            chips; a jax transform takes it, since it gives arrays of numpy.
    """
    check_one_chip(params, "score")
    if is_traced((params, sequences)):
        raise InputError(
            f"detspec.score gives arrays of numpy, so no jax transform takes it: call it outside, or {DIFFERENTIABLE}"
        )
    sequences = [plain_ids(text, "a text") for text in listed_prompts(sequences, "texts")]
    if not sequences:
        return []
    schedule = chosen_schedule(schedule, cfg)
    max_len = max_len or max(schedule.budget.window, *(len(text) + 1 for text in sequences))
    sampling = [SamplingParams(max_tokens=1, thinking=False)] * len(sequences)
    state = start_state(cfg, sequences, sampling, eos_ids=(), max_len=max_len, schedule=schedule)
    replayed, _ = _replay(params, cfg, state, schedule=schedule, choose=False)
    logprobs = np.array(replayed.logprobs)
    logprobs[:, 0] = np.nan
    return [found[: len(text)] for found, text in zip(logprobs, sequences, strict=True)]


def replay(
    params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule, choose: bool = True, top_k: int = 0
) -> tuple[Replayed, GenState]:
    """Reads what the cache lacks of every live sequence's committed tokens, teacher-forced, all windows packed into passes.

    Args:
        choose: whether targets are wanted, whose noise takes time.
        top_k: how many of the likeliest tokens are wanted at every position.

    Returns:
        What the passes say of positions `cache.length + 1 .. committed`, the last of which is about the next token: it has a
        target, but no log-probability of a given token. And the state with `cache.length == committed - 1`.
    """
    given = spans(state.cache.length, jnp.where(state.live, state.committed, 0), schedule)
    asked = Asked(state.riders.processing, choose, top_k)
    with jax.named_scope("replay"):
        of_all = jnp.zeros_like(state.committed)
        replayed, cache = read(params, cfg, state, given, schedule=schedule, asked=asked, wanted_from=of_all)
    length = jnp.where(state.live, state.committed - 1, state.cache.length)
    return replayed, state.replace(cache=cache.replace(length=length))


def read(
    params: Params, cfg: ModelConfig, state: GenState, given: Spans, *, schedule: Schedule, asked: Asked, wanted_from: jax.Array
) -> tuple[Replayed, KVCache]:
    """Canonical passes over the spans `given` of the tokens of `state`, whose cache holds what stands before each of them.

    Returns what they say of tokens at positions from `wanted_from [B]` int32 on, of those after the ones that they read, and
    the cache. A pass over none of these only fills the cache, like `fill`.
    """
    B, T = state.tokens.shape
    W = schedule.budget.window
    riders = state.riders.replace(processing=asked.processing)
    prompt_len = state.sampling.prompt_len
    walked = riders.walked(state.tokens, prompt_len, T, anew=True)

    def say(logits_f32: jax.Array, of_row: jax.Array, position: jax.Array, texts_fn: TextsFn) -> Replayed:
        """All about the tokens at `position [R]` of sequences `of_row [R]`, from the logits `[R, V]` before them."""
        tokens = state.tokens[of_row, jnp.minimum(position, T - 1)]
        rows = riders.rows(of_row, position - prompt_len[of_row], walked)
        process_fn = riders.process_fn(rows, position, texts_fn)
        reported = reported_logits(logits_f32, position, rows["sampling"], process_fn)
        numbers = numbers_of(reported, schedule.numerics)
        logprobs = numbers.logprobs_at(reported, tokens)
        top_ids = likeliest(reported, asked.top_k)
        top_logprobs = jnp.zeros((of_row.shape[0], 0), jnp.float32)
        if asked.top_k:
            top_logprobs = jax.vmap(partial(numbers.logprobs_at, reported), in_axes=1, out_axes=1)(top_ids)
        targets = target_logprobs = None
        if asked.choose:
            choose = choose_fn(riders, schedule.numerics)
            targets, target_logprobs = choose(logits_f32, position, rows, texts_fn)
        return Replayed(
            logprobs=jnp.where(position < state.committed[of_row], logprobs, 0.0),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            targets=targets,
            target_logprobs=target_logprobs,
        )

    def run_pass(windows: Windows, carry: tuple[Replayed, KVCache]) -> tuple[Replayed, KVCache]:
        replayed, cache = carry
        sequence = jnp.maximum(windows.sequence, 0)
        of_row = jnp.repeat(sequence, W)
        position = windows.positions.reshape(-1) + 1
        wanted = windows.used & (windows.positions + 1 >= wanted_from[sequence][:, None])
        place = jnp.where(wanted.reshape(-1), position, T)
        windows = windows.replace(wanted=wanted)
        _, cache, stream = forward(
            params, cfg, windows, cache, numerics=schedule.numerics, riding=state.riding(windows), tap_layer=cfg.num_layers
        )
        assert stream is not None
        logits = logits_fn(params, cfg, windows, stream, numerics=schedule.numerics)

        def find() -> Replayed:
            return share_rows(say, logits(), of_row, position, texts_fn=lambda: state.tokens[sequence])

        found = jax.lax.cond(wanted.any(), find, lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(find)))
        return jax.tree.map(lambda all, new: all.at[of_row, place].set(new, mode="drop"), replayed, found), cache

    empty = Replayed(
        logprobs=jnp.zeros((B, T), jnp.float32),
        top_ids=jnp.zeros((B, T, asked.top_k), jnp.int32),
        top_logprobs=jnp.zeros((B, T, asked.top_k), jnp.float32),
        targets=jnp.zeros((B, T), jnp.int32) if asked.choose else None,
        target_logprobs=jnp.zeros((B, T), jnp.float32) if asked.choose else None,
    )
    return run_passes(run_pass, (empty, state.cache), state.tokens, given, schedule=schedule)


_replay = Jitted(replay, static_argnames=("cfg", "schedule", "choose"), donate_argnames=("state",))
