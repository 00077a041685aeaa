"""The model guesses for itself on its cheapest schedule: LLM-42's fast path (arXiv 2601.17768, section 4)."""

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.draft.draft_fn import DraftFn, draft_limit
from detspec.errors import InputError
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.sampler import sample
from detspec.schedule import Schedule
from detspec.state import Draft, GenState, Windows
from detspec.stopping import is_stop


def self_draft(window: int, schedule: Schedule) -> DraftFn:
    """A `draft_fn` that decodes up to `window - 1` tokens a row, one at a time, all ready rows in one batch.

    Rows stop guessing at a stop token and at their limit. The guesses of ordinary rows are final: `commit` takes them as
    they are.
    """
    if window < 2:
        raise InputError(f"the self draft needs a window of at least 2 (window - 1 guesses), got {window}")

    def draft(params: Params, cfg: ModelConfig, state: GenState) -> Draft:
        B = state.tokens.shape[0]
        fast = schedule.fast(B)
        final = ~state.deterministic
        limit = draft_limit(state, window, final)
        last = jnp.take_along_axis(state.tokens, state.committed[:, None] - 1, axis=1)[:, 0]

        def decode(
            step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, KVCache]
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, KVCache]:
            last, going, tokens, logprobs, count, cache = carry
            going &= step < limit
            row = jnp.arange(B, dtype=jnp.int32)
            position = state.cache.length + step
            windows = Windows(tokens=last[:, None], row=row, start=position, count=going.astype(jnp.int32))
            logits_f32, cache, _ = forward(params, cfg, windows, cache, numerics=fast.numerics, inject=state.inject(windows))

            def texts() -> jax.Array:
                """Committed tokens and the guesses so far, `[B, max_len]`."""
                guess = jnp.arange(window - 1, dtype=jnp.int32)[None, :]
                place = jnp.where(guess < step, state.committed[:, None] + guess, state.tokens.shape[1])
                return state.tokens.at[row[:, None], place].set(tokens, mode="drop")

            chosen, logprob = sample(logits_f32[:, 0], position + 1, state.sampling, texts, numerics=fast.numerics)
            tokens = tokens.at[:, step].set(chosen)
            logprobs = logprobs.at[:, step].set(logprob)
            count += going.astype(jnp.int32)
            return chosen, going & ~is_stop(chosen[:, None], state.sampling.stop_ids)[:, 0], tokens, logprobs, count, cache

        tokens = jnp.zeros((B, window - 1), jnp.int32)
        logprobs = jnp.zeros((B, window - 1), jnp.float32)
        carry = (last, state.ready, tokens, logprobs, jnp.zeros(B, jnp.int32), state.cache)
        with jax.named_scope("draft"):
            _, _, tokens, logprobs, count, cache = jax.lax.fori_loop(0, window - 1, decode, carry)
        return Draft(tokens=tokens, logprobs=logprobs, count=count, final=final, cache=cache)

    return draft
