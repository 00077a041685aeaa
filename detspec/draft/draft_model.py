"""A smaller model drafts: other weights, another config, its keys and values in page pools of its own.

Its pools are used by the same page tables, so requests with equal beginnings share its pages, too. Each slot has a hash of the
text that its keys and values stand for, so the draft model finds out by itself what is still of use:

    text    5 7 9 3 8      hashes of 5 | 5 7 | 5 7 9 | 5 7 9 3 | 5 7 9 3 8
    slots   5 7 9 2 4      hashes of 5 | 5 7 | 5 7 9 | 5 7 9 2 | 5 7 9 2 4      2 4 were drafted and rejected

Positions 0 to 2 are of use, 3 is read again, 8 is the next input. A rollback, a preemption, a page that was copied and another
request in the same place all look like that. Two texts with equal hashes would cost drafts, no correctness.
"""

from functools import cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import KV, KVCache, cache_pools, init_cache, shares_pages
from detspec.config import ModelConfig
from detspec.draft.self_draft import self_draft
from detspec.draft.source import Drafter, DraftSource
from detspec.errors import InputError
from detspec.model.params import Params, active_params
from detspec.model.transformer import forward
from detspec.passes import Spans, limited, run_passes
from detspec.schedule import Numerics, Schedule
from detspec.state import Draft, DraftState, GenState, Windows
from detspec.struct import Struct

PRIOR_ACCEPTANCE = 0.7
MAX_PASSES = 4  # over what its cache lacks, so that long prompts do not hold up a step for long


class Held(Struct):
    """The draft model's pools, as those of `KVCache`, and what their slots stand for."""

    pools: tuple[Any, ...]
    hashes: jax.Array  # [num_pages, page] uint32, of the text up to each slot's token; see `text_hashes`


class Weighted(Protocol):
    """A model, such as `detspec.load` gives: its shape and its weights."""

    @property
    def cfg(self) -> ModelConfig:
        """Shape of the model."""

    @property
    def params(self) -> Params:
        """Weights of the model."""


def draft_model(model: Weighted, *, target: Weighted) -> Drafter:
    """A draft source that decodes with `model`, for engines of `target`.

        small = ds.load("Qwen3-0.6B")
        engine = ds.Engine(target, drafters={"draft_model": ds.draft_model(small, target=target)})

    Both need the same tokenizer: ids that mean other tokens are drafts that fail. Memory is that of its weights, and of keys
    and values in as many pages as the engine has.

    Raises `InputError` if the vocabularies have other sizes, or the draft model thinks or keeps states by sequence.
    """
    if model.cfg.vocab_size != target.cfg.vocab_size:
        raise InputError(
            f"the draft model has {model.cfg.vocab_size} tokens, the model {target.cfg.vocab_size}: a draft model needs the "
            "same vocabulary"
        )
    if not shares_pages(model.cfg, Numerics()):
        raise InputError(
            "a model with layers that keep states by sequence cannot be a draft model: it could not go back to them"
        )
    if not any(isinstance(pools, KV) for pools in cache_pools(target.cfg, Numerics())):
        raise InputError("the model has no attention layers, whose pages the draft model would share: use another draft")
    if model.cfg.thinking is not None:
        raise InputError("a model that thinks cannot be a draft model: it would have to think about prompts of its own")
    return Drafter(draft_model_source(model.cfg, _bytes_read(model.cfg) / _bytes_read(target.cfg)), model.params)


@cache
def draft_model_source(own_cfg: ModelConfig, cost: float) -> DraftSource:
    """The draft source of models of `own_cfg`, whose step is believed to take `cost` ordinary steps; its params are weights."""
    return DraftSource(
        name="draft_model",
        init=partial(_init, own_cfg),
        draft=partial(_draft, own_cfg),
        cost_s=partial(_cost_s, cost),
        executes=False,
        prior_acceptance=PRIOR_ACCEPTANCE,
    )


def text_hashes(tokens: jax.Array) -> jax.Array:
    """A hash of each beginning of the texts `tokens [B, T]`, the token at its place included: `[B, T]` uint32.

    They are sums of tokens times odd numbers that look random, one for each position, modulo 2^32.
    """
    mixed = jnp.arange(tokens.shape[1], dtype=jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0x9E3779B1)):  # as in MurmurHash3's last step (A. Appleby)
        mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
    return jnp.cumsum((tokens.astype(jnp.uint32) + 1) * (mixed | 1)[None, :], axis=1, dtype=jnp.uint32)


def _init(own_cfg: ModelConfig, cfg: ModelConfig, schedule: Schedule, state: GenState) -> DraftState:
    B, max_len = state.tokens.shape
    num_pages = state.cache.num_pages
    own = init_cache(own_cfg, max_requests=B, max_len=max_len, numerics=schedule.numerics, num_pages=num_pages - 1)
    hashes = jnp.zeros((num_pages, schedule.numerics.page), jnp.uint32)
    return DraftState(shared=Held(pools=own.pools, hashes=hashes))


def _draft(
    own_cfg: ModelConfig,
    own_params: Params,
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    schedule: Schedule,
    num_tokens: int,
) -> Draft:
    """`DraftSource.draft`: what `self_draft` decodes with the draft model, after passes over what its cache lacks.

    A sequence drafts once its committed tokens have been read. The draft model decodes one token more than it drafts, so that
    nothing is lacking if all of them are accepted.
    """
    held = state.draft.shared
    last = state.committed - 1
    hashes = text_hashes(state.tokens)
    cache, of_use = _found(held, state, hashes)
    lacking = Spans(
        sequence=jnp.arange(last.shape[0], dtype=jnp.int32),
        start=jnp.minimum(of_use, last),
        end=jnp.where(state.ready, last, 0),
    )
    lacking = limited(lacking, jnp.int32(MAX_PASSES), schedule)

    def read(windows: Windows, own: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
        cache, written = own
        numerics = schedule.numerics.for_weights(own_cfg.dtype)
        cache = forward(own_params, own_cfg, windows, cache, numerics=numerics).cache
        sequence = jnp.maximum(windows.sequence, 0)[:, None]
        of_text = hashes[sequence, jnp.minimum(windows.positions, hashes.shape[1] - 1)]
        return cache, _marked(written, cache, sequence, windows.positions, of_text, windows.used)

    with jax.named_scope("read for draft"):
        cache, written = run_passes(read, (cache, held.hashes), state.tokens, lacking, schedule=schedule)
    # From here on it is the self draft of another model, none of whose tokens is a result.
    length = jnp.maximum(jnp.minimum(of_use, last), lacking.end)
    alike = state.replace(
        cache=cache.replace(length=length),
        live=state.ready,
        riders=state.riders.for_draft_model(),
        deterministic=jnp.ones_like(state.deterministic),
    )
    decoded = self_draft((), own_params, own_cfg, alike, schedule, num_tokens + 1)
    # What was fed is the last committed token, and all that was decoded but its last token.
    fed = jnp.arange(num_tokens + 1, dtype=jnp.int32)[None, :]
    position = last[:, None] + fed
    hashes = text_hashes(decoded.appended(state.tokens, state.committed))
    of_text = jnp.take_along_axis(hashes, jnp.minimum(position, hashes.shape[1] - 1), axis=1)
    each = lacking.sequence[:, None]
    written = _marked(written, decoded.cache, each, position, of_text, fed < decoded.count[:, None])
    return decoded.replace(
        tokens=decoded.tokens[:, :num_tokens],
        logprobs=decoded.logprobs[:, :num_tokens],
        count=jnp.minimum(decoded.count, num_tokens),
        chance=jnp.full_like(decoded.chance, PRIOR_ACCEPTANCE),
        cache=state.cache,
        state=DraftState(shared=Held(pools=decoded.cache.pools, hashes=written)),
    )


def _found(held: Held, state: GenState, hashes: jax.Array) -> tuple[KVCache, jax.Array]:
    """The draft model's cache under the page table of `state`, and how many positions of each text it has, `[B]` int32."""
    cache = KVCache(pools=held.pools, page_table=state.cache.page_table, length=jnp.zeros_like(state.committed))
    B, max_len = hashes.shape
    found = held.hashes[cache.page_table].reshape(B, -1)[:, :max_len]
    place = jnp.arange(max_len, dtype=jnp.int32)[None, :]
    return cache, jnp.where(found == hashes, max_len, place).min(1)


def _marked(
    hashes: jax.Array, cache: KVCache, sequence: jax.Array, position: jax.Array, of_text: jax.Array, used: jax.Array
) -> jax.Array:
    """`hashes` with those of texts put at the slots of positions `[n, m]` of sequences `[n, 1]`, where `used [n, m]`."""
    num_pages, slots = hashes.shape
    table = cache.page_table[sequence, jnp.minimum(position // slots, cache.page_table.shape[1] - 1)]
    page = jnp.where(used, table, num_pages)  # out of range: dropped
    return hashes.at[page, position % slots].set(of_text, mode="drop")


def _cost_s(cost: float, num_tokens: int, ordinary_step_s: float) -> float:
    """`DraftSource.cost_s`: it decodes one token more than it drafts."""
    return cost * (num_tokens + 1) * ordinary_step_s


def _bytes_read(cfg: ModelConfig) -> int:
    """Bytes of weights that a token is multiplied with."""
    return active_params(cfg) * (1 if cfg.weights == "int8" else np.dtype(cfg.jax_dtype).itemsize)
