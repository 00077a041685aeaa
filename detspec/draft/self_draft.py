"""The model drafts for itself on its cheapest schedule: LLM-42's fast path (arXiv 2601.17768, section 4)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.draft.source import DraftParams, DraftSource, draft_limit, no_state
from detspec.errors import InputError
from detspec.model.params import Params, quantized
from detspec.model.transformer import forward
from detspec.ops.collectives import share_rows
from detspec.sampler import choose_fn
from detspec.schedule import Schedule
from detspec.state import Draft, GenState, Windows


class _Decoded(NamedTuple):
    """Carry of the loop over drafted tokens."""

    last: jax.Array  # [B] int32, the newest token of each sequence
    going: jax.Array  # [B] bool, False once a sequence drafts no more
    tokens: jax.Array  # [B, D] int32
    logprobs: jax.Array  # [B, D] float32
    num_drafted: jax.Array  # [B] int32
    following: dict[str, Any]  # states of riders that follow the text, after the tokens so far
    cache: KVCache


def self_draft(
    draft_params: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule, num_tokens: int
) -> Draft:
    """`DraftSource.draft` that decodes up to `num_tokens`, one at a time, all ready sequences in one batch.

    A sequence stops drafting at a stop token and at its limit. The drafts of ordinary sequences are final: `commit` takes
    them as they are.

    Raises `InputError` if it is to draft nothing.
    """
    B = state.tokens.shape[0]
    if num_tokens < 1:
        raise InputError(f"the self draft needs room for at least 1 token (windows of 2), got {num_tokens}")
    numerics = schedule.fast(B).numerics.for_weights(cfg.dtype)
    final = ~state.deterministic
    limit = draft_limit(state, num_tokens, final)
    sequence = jnp.arange(B, dtype=jnp.int32)

    def decode(step: jax.Array, carry: _Decoded) -> _Decoded:
        going = carry.going & (step < limit)
        position = state.cache.length + step
        windows = Windows(tokens=carry.last[:, None], sequence=sequence, start=position, count=going.astype(jnp.int32))
        logits_f32, cache, _ = forward(params, cfg, windows, carry.cache, numerics=numerics, riding=state.riding(windows))

        def texts() -> jax.Array:
            """Committed tokens and the drafts so far, `[B, max_len]`."""
            offset = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
            place = jnp.where(offset < step, state.committed[:, None] + offset, state.tokens.shape[1])
            return state.tokens.at[sequence[:, None], place].set(carry.tokens, mode="drop")

        riders = state.riders.at(carry.following)
        choose = choose_fn(riders, numerics)
        chosen, logprob = share_rows(choose, logits_f32, position + 1, riders.rows(), texts_fn=texts)
        return _Decoded(
            last=chosen,
            going=going & ~state.sampling.is_stop(chosen[:, None])[:, 0],
            tokens=carry.tokens.at[:, step].set(chosen),
            logprobs=carry.logprobs.at[:, step].set(logprob),
            num_drafted=carry.num_drafted + going.astype(jnp.int32),
            following=riders.after(chosen),
            cache=cache,
        )

    carry = _Decoded(
        last=jnp.take_along_axis(state.tokens, state.committed[:, None] - 1, axis=1)[:, 0],
        going=state.ready,
        tokens=jnp.zeros((B, num_tokens), jnp.int32),
        logprobs=jnp.zeros((B, num_tokens), jnp.float32),
        num_drafted=jnp.zeros(B, jnp.int32),
        following=state.riders.following,
        cache=state.cache,
    )
    with jax.named_scope("draft"):
        done = jax.lax.fori_loop(0, num_tokens, decode, carry)
    return Draft(
        tokens=done.tokens,
        logprobs=done.logprobs,
        count=done.num_drafted,
        chance=jnp.full(B, SELF.prior_acceptance, jnp.float32),
        final=final,
        cache=done.cache,
        state=state.draft,
    )


def self_draft_cost(num_tokens: int, ordinary_step_s: float) -> float:
    """`DraftSource.cost_s`: one ordinary step for each drafted token."""
    return num_tokens * ordinary_step_s


SELF = DraftSource("self", no_state, self_draft, self_draft_cost, executes=True, prior_acceptance=0.99)


def int8_draft(
    draft_params: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule, num_tokens: int
) -> Draft:
    """`DraftSource.draft` of the same model with its matrices rounded: `draft_params` are `quantized` ones.

    They are other weights, so none of its tokens is a result, and its keys and values stand only where verification rewrites
    them.
    """
    verified = state.replace(deterministic=jnp.ones_like(state.deterministic))
    draft = self_draft((), draft_params, cfg, verified, schedule, num_tokens)
    return draft.replace(chance=jnp.full_like(draft.chance, INT8.prior_acceptance))


def int8_draft_cost(num_tokens: int, ordinary_step_s: float) -> float:
    """`DraftSource.cost_s`: half of the bytes, so half of an ordinary step that is bound by reading weights."""
    return 0.5 * num_tokens * ordinary_step_s


INT8 = DraftSource("int8", no_state, int8_draft, int8_draft_cost, executes=False, prior_acceptance=0.98, derive=quantized)
