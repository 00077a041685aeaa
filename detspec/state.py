"""What a generator carries: windows of a pass, drafts, verdicts, and the state between steps."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from detspec.cache import KVCache

PAD_ID = 0  # fills token buffers past the committed tokens; never read
NO_SEQUENCE = -1  # a window that belongs to no sequence: padding of a pass
NO_TOKEN = -1  # fills the unused stop tokens and biased tokens of a sequence

# Why a sequence ended (`GenState.finish`).
RUNNING, STOP, LENGTH, NOT_FINITE = range(4)


class Windows(flax.struct.PyTreeNode):
    """`G` runs of at most `W` consecutive positions, each of one sequence: the input of one pass.

    A window of `W = 4` holding the last committed token and two drafted ones: `tokens [T0 T1' T2' pad]`, `count 3`.
    """

    tokens: jax.Array  # [G, W] int32
    sequence: jax.Array  # [G] int32, index of the sequence or NO_SEQUENCE
    start: jax.Array  # [G] int32, position of tokens[:, 0]
    count: jax.Array  # [G] int32, tokens in use; 0 for padding

    @property
    def positions(self) -> jax.Array:
        """Absolute positions `[G, W]`; unused places repeat the last used one."""
        offset = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return self.start[:, None] + jnp.minimum(offset[None, :], jnp.maximum(self.count - 1, 0)[:, None])

    @property
    def used(self) -> jax.Array:
        """`[G, W]` bool, True where a token is not padding."""
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :] < self.count[:, None]


class SamplingArrays(flax.struct.PyTreeNode):
    """Sampling parameters of `B` sequences, or of the `R` token rows of a pass.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the other penalties 0 are off.
    """

    temperature: jax.Array  # [B] float32
    top_k: jax.Array  # [B] int32
    top_p: jax.Array  # [B] float32
    min_p: jax.Array  # [B] float32
    seed: jax.Array  # [B] uint32
    repetition_penalty: jax.Array  # [B] float32
    frequency_penalty: jax.Array  # [B] float32
    presence_penalty: jax.Array  # [B] float32
    prompt_len: jax.Array  # [B] int32, position of the first new token
    min_len: jax.Array  # [B] int32, positions before it cannot hold a stop token
    stop_ids: jax.Array  # [B, max_stop_ids] int32, NO_TOKEN where unused
    bias_ids: jax.Array  # [B, max_logit_bias] int32, tokens whose logits are shifted, NO_TOKEN where unused
    bias_values: jax.Array  # [B, max_logit_bias] float32, added to the logits of `bias_ids`
    processed_logprobs: jax.Array  # [B] bool, log-probabilities of new tokens are those they were drawn with, not raw ones

    def is_stop(self, tokens: jax.Array) -> jax.Array:
        """True where `tokens [B, n]` is one of its sequence's stop tokens; `[B, n]` bool."""
        return (tokens[:, :, None] == self.stop_ids[:, None, :]).any(-1)


class Counters(flax.struct.PyTreeNode):
    """What speculation did for each sequence, `[B]` int32; the last four count the reading of a prompt with thoughts."""

    num_verify_passes: jax.Array
    num_draft_tokens: jax.Array
    num_accepted_draft_tokens: jax.Array
    num_rollbacks: jax.Array
    num_recomputed_tokens: jax.Array
    num_read_passes: jax.Array  # canonical passes that held chunks of the sequence
    num_draft_thoughts: jax.Array  # drafted thoughts that were verified
    num_accepted_thoughts: jax.Array  # drafted thoughts that were right
    num_rejected_thoughts: jax.Array  # passes that ended at a wrong draft: one less than the rounds of speculation


class Reading(flax.struct.PyTreeNode):
    """How far each prompt has been read by a model that thinks, and what it thought.

    A thought follows each chunk of `C` tokens that ends before the last prompt token. A prompt of 11 tokens, `C = 4`, read up
    to its second chunk:

        chunks    t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 t10       end 2, for the last chunk has no thought
        thoughts  Z0            Z1                            read 1: Z0 is committed, Z1 is a draft
        states    0             of Z0         of Z1           `states` holds those of Z0, for chunk `read`
    """

    thoughts: jax.Array  # [B, X, M] int32, filled with NO_TOKEN: committed after chunks below `read`, drafted after later ones
    read: jax.Array  # [B] int32, chunks whose thoughts are committed; their keys and values are in the cache
    end: jax.Array  # [B] int32, chunks of the prompt that a thought follows; 0 for a sequence that does not think
    states: jax.Array  # [B, C, D], added to the stream of chunk `read`
    end_id: int = flax.struct.field(pytree_node=False)  # the token that ends a thought

    @property
    def chunk(self) -> int:
        """`C`."""
        return self.states.shape[1]


class DraftState(flax.struct.PyTreeNode):
    """What a draft source keeps between steps: for example the cache of a draft model."""

    sequences: Any = ()  # leaves [B, ...], gathered and put back together with their sequences
    shared: Any = ()  # passed along whole: page pools


NO_DRAFT_STATE = DraftState()


class GenState(flax.struct.PyTreeNode):
    """The whole state of a batch between two steps.

    Invariant for every sequence that is live and prefilled: `cache.length == committed - 1`. The keys and values of all
    committed tokens but the last are in the cache, and the last one is the next input. Sequences that lack more are
    catching up: they commit nothing, and passes take stretches of them along.
    """

    tokens: jax.Array  # [B, max_len] int32, prompt and committed tokens, then PAD_ID
    logprobs: jax.Array  # [B, max_len] float32, of committed tokens; 0 for the prompt
    committed: jax.Array  # [B] int32, number of final tokens, prompt included
    limit: jax.Array  # [B] int32, `committed` at which the sequence ends
    live: jax.Array  # [B] bool
    finish: jax.Array  # [B] int32, RUNNING, STOP, LENGTH or NOT_FINITE
    deterministic: jax.Array  # [B] bool, False commits from the fast path unverified
    sampling: SamplingArrays
    counters: Counters
    cache: KVCache
    reading: Reading | None = None  # None if the model does not think
    draft: DraftState = NO_DRAFT_STATE  # belongs to the draft source of the program that runs

    @property
    def ready(self) -> jax.Array:
        """`[B]` bool, live sequences that have caught up, so that the last committed token is the next input."""
        return self.live & (self.cache.length >= self.committed - 1)

    @property
    def catching_up(self) -> jax.Array:
        """`[B]` bool, live sequences whose tokens any pass may take: all but those that still think about their prompt."""
        return self.live if self.reading is None else self.live & (self.reading.read >= self.reading.end)

    def inject(self, windows: Windows) -> jax.Array | None:
        """What is added to the stream of `windows` of sequences that have thought: `[G, W, D]`, or None without thinking."""
        if self.reading is None:
            return None
        sequence = jnp.maximum(windows.sequence, 0)
        C = self.reading.chunk
        offset = windows.positions - (self.reading.read[sequence] * C)[:, None]
        states = self.reading.states[sequence[:, None], jnp.clip(offset, 0, C - 1)]
        inside = (offset >= 0) & (offset < C) & (self.reading.end[sequence] > 0)[:, None]
        return jnp.where(inside[:, :, None], states, jnp.zeros_like(states))


class Draft(flax.struct.PyTreeNode):
    """Drafted next tokens of each sequence, with the cache and the source's state as drafting left them."""

    tokens: jax.Array  # [B, W-1] int32
    logprobs: jax.Array  # [B, W-1] float32, of the pass that drafted; read only where `final`
    count: jax.Array  # [B] int32, drafted tokens in use
    final: jax.Array  # [B] bool, True where the drafted tokens are results: ordinary sequences on the fast path
    cache: KVCache
    state: DraftState = NO_DRAFT_STATE


class Verified(flax.struct.PyTreeNode):
    """What the canonical pass says of each sequence's window: its own choice at every place."""

    targets: jax.Array  # [B, W] int32, the choice after each token of the window
    logprobs: jax.Array  # [B, W] float32, log-probability of each target, raw or processed as its request asks
    drafted: jax.Array  # [B] int32, drafted tokens that were in the window
    accepted: jax.Array  # [B] int32, leading drafted tokens that equal their targets
    in_pass: jax.Array  # [B] bool, False for sequences that were not verified
    cache: KVCache


def init_counters(num_sequences: int) -> Counters:
    """All counters at zero."""
    return Counters(**{name: jnp.zeros(num_sequences, jnp.int32) for name in Counters.__dataclass_fields__})
