"""What a generator carries: windows of a pass, drafts, verdicts, and the state between steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from detspec.cache import KVCache, filled
from detspec.struct import Struct

PAD_ID = 0  # fills token buffers past the committed tokens; never read
NO_SEQUENCE = -1  # a window that belongs to no sequence: padding of a pass
NO_TOKEN = -1  # fills the unused stop tokens and biased tokens of a sequence

# Why a sequence ended (`GenState.finish`).
RUNNING, STOP, LENGTH, NOT_FINITE = range(4)


class Windows(Struct):
    """`G` runs of at most `W` consecutive positions, each of one sequence: the input of one pass.

    A window of `W = 4` holding the last committed token and two drafted ones: `tokens [T0 T1' T2' pad]`, `count 3`.
    """

    tokens: jax.Array  # [G, W] int32
    sequence: jax.Array  # [G] int32, index of the sequence or NO_SEQUENCE
    start: jax.Array  # [G] int32, position of tokens[:, 0]
    count: jax.Array  # [G] int32, tokens in use; 0 for padding
    wanted: jax.Array | None = None  # [G, W] bool, rows of which more is wanted than keys and values; None for all in use

    @property
    def positions(self) -> jax.Array:
        """Absolute positions `[G, W]`; unused places repeat the last used one."""
        offset = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return self.start[:, None] + jnp.minimum(offset[None, :], jnp.maximum(self.count - 1, 0)[:, None])

    @property
    def used(self) -> jax.Array:
        """`[G, W]` bool, True where a token is not padding."""
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :] < self.count[:, None]


class Injected(NamedTuple):
    """Vectors that a pass adds to the stream."""

    depth: int  # after so many layers
    values: jax.Array  # [G, W, D], or [B, T, D] of whole sequences

    def at(self, depth: int, x: jax.Array) -> jax.Array:
        """The stream `x [..., D]` after `depth` layers, with the vectors if this is where they go in."""
        return x + self.values.reshape(x.shape).astype(x.dtype) if depth == self.depth else x


# What stands in a column of its own, in this order; after it come stop tokens, biased tokens and their biases.
SCALARS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.uint32,
    "repetition_penalty": np.float32,
    "frequency_penalty": np.float32,
    "presence_penalty": np.float32,
    "prompt_len": np.int32,
    "min_len": np.int32,
    "logprobs_mode": np.int32,
}


def _scalar(name: str) -> Any:
    """The column called `name`, `[B]`."""
    index = list(SCALARS).index(name)
    dtype = SCALARS[name]

    def column(rows: "SamplingArrays") -> jax.Array:
        return jax.lax.bitcast_convert_type(rows.packed[:, index], dtype)

    return property(column)


class SamplingArrays(Struct):
    """Sampling parameters of `B` sequences, or of the `R` token rows of a pass, side by side in one array.

    As an array each, programs would move them one by one, and take a quarter longer to compile. `temperature` 0 is greedy;
    `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the other penalties 0 are off.
    """

    packed: jax.Array  # [B, X] int32
    max_stop_ids: int = struct.field(pytree_node=False)
    # False leaves out of programs all but temperature and noise: for sequences that ask for nothing else
    processing: bool = struct.field(pytree_node=False, default=True)

    temperature = _scalar("temperature")  # [B] float32
    top_k = _scalar("top_k")  # [B] int32
    top_p = _scalar("top_p")  # [B] float32
    min_p = _scalar("min_p")  # [B] float32
    seed = _scalar("seed")  # [B] uint32
    repetition_penalty = _scalar("repetition_penalty")  # [B] float32
    frequency_penalty = _scalar("frequency_penalty")  # [B] float32
    presence_penalty = _scalar("presence_penalty")  # [B] float32
    prompt_len = _scalar("prompt_len")  # [B] int32, position of the first new token
    min_len = _scalar("min_len")  # [B] int32, positions before it cannot hold a stop token
    logprobs_mode = _scalar("logprobs_mode")  # [B] int32, place in `LOGPROBS_MODES`

    @property
    def max_logit_bias(self) -> int:
        """Room for biased tokens."""
        return (self.packed.shape[1] - len(SCALARS) - self.max_stop_ids) // 2

    @property
    def stop_ids(self) -> jax.Array:
        """`[B, max_stop_ids]` int32, NO_TOKEN where unused."""
        return self.packed[:, len(SCALARS) : len(SCALARS) + self.max_stop_ids]

    @property
    def bias_ids(self) -> jax.Array:
        """`[B, max_logit_bias]` int32, tokens whose logits are shifted, NO_TOKEN where unused."""
        begin = len(SCALARS) + self.max_stop_ids
        return self.packed[:, begin : begin + self.max_logit_bias]

    @property
    def bias_values(self) -> jax.Array:
        """`[B, max_logit_bias]` float32, added to the logits of `bias_ids`."""
        return jax.lax.bitcast_convert_type(self.packed[:, self.packed.shape[1] - self.max_logit_bias :], jnp.float32)

    def is_stop(self, tokens: jax.Array) -> jax.Array:
        """True where `tokens [B, n]` is one of its sequence's stop tokens; `[B, n]` bool."""
        return (tokens[:, :, None] == self.stop_ids[:, None, :]).any(-1)


COUNTED = (
    "num_verify_passes",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_rollbacks",
    "num_recomputed_tokens",
    "num_read_passes",
    "num_draft_thoughts",
    "num_accepted_thoughts",
    "num_rejected_thoughts",
)


def _count(name: str) -> Any:
    """What is counted as `name`, `[B]` int32."""
    index = COUNTED.index(name)
    return property(lambda counters: counters.counts[:, index])


class Counters(Struct):
    """What speculation did for each sequence; the last four count the reading of a prompt with thoughts."""

    counts: jax.Array  # [B, 9] int32, in the order of `COUNTED`

    num_verify_passes = _count("num_verify_passes")
    num_draft_tokens = _count("num_draft_tokens")
    num_accepted_draft_tokens = _count("num_accepted_draft_tokens")
    num_rollbacks = _count("num_rollbacks")
    num_recomputed_tokens = _count("num_recomputed_tokens")
    num_read_passes = _count("num_read_passes")  # canonical passes that held chunks of the sequence
    num_draft_thoughts = _count("num_draft_thoughts")  # drafted thoughts that were verified
    num_accepted_thoughts = _count("num_accepted_thoughts")  # drafted thoughts that were right
    num_rejected_thoughts = _count("num_rejected_thoughts")  # passes that ended at a wrong draft: the rounds but one

    def add(self, **more: jax.Array) -> "Counters":
        """The same with `[B]` int32 or bool added to some counts."""
        B = self.counts.shape[0]
        added = [jnp.asarray(more.pop(name, np.zeros(B, np.int32)), jnp.int32) for name in COUNTED]
        assert not more, f"not counted: {more}"
        return Counters(self.counts + jnp.stack(added, axis=1))


class Reading(Struct):
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
    end_id: int = struct.field(pytree_node=False)  # the token that ends a thought
    in_layer: int = struct.field(pytree_node=False)  # how many layers the stream has been through when states are added

    @property
    def chunk(self) -> int:
        """`C`."""
        return self.states.shape[1]


class DraftState(Struct):
    """What a draft source keeps between steps: for example the cache of a draft model."""

    sequences: Any = ()  # leaves [B, ...], gathered and put back together with their sequences
    shared: Any = ()  # passed along whole: page pools


NO_DRAFT_STATE = DraftState()


class GenState(Struct):
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
    sampling: SamplingArrays  # sampling parameters of each sequence
    counters: Counters  # what speculation did for each sequence
    cache: KVCache  # keys and values in pages, and their length
    reading: Reading | None = None  # None if the model does not think
    draft: DraftState = NO_DRAFT_STATE  # belongs to the draft source of the program that runs

    def with_processing(self, processing: bool) -> "GenState":
        """The same for programs with or without logits processing, see `SamplingArrays`."""
        return self.replace(sampling=self.sampling.replace(processing=processing))

    @property
    def ready(self) -> jax.Array:
        """`[B]` bool, live sequences that have caught up, so that the last committed token is the next input."""
        return self.live & (self.cache.length >= self.committed - 1)

    @property
    def catching_up(self) -> jax.Array:
        """`[B]` bool, live sequences whose tokens any pass may take: all but those that still think about their prompt."""
        return self.live if self.reading is None else self.live & (self.reading.read >= self.reading.end)

    def inject(self, windows: Windows) -> Injected | None:
        """The states `[G, W, D]` that `windows` of sequences that have thought get; None without thinking."""
        if self.reading is None:
            return None
        sequence = jnp.maximum(windows.sequence, 0)
        C = self.reading.chunk
        offset = windows.positions - (self.reading.read[sequence] * C)[:, None]
        states = self.reading.states[sequence[:, None], jnp.clip(offset, 0, C - 1)]
        inside = (offset >= 0) & (offset < C) & (self.reading.end[sequence] > 0)[:, None]
        return Injected(self.reading.in_layer, jnp.where(inside[:, :, None], states, jnp.zeros_like(states)))


class Draft(Struct):
    """Drafted next tokens of each sequence, with the cache and the source's state as drafting left them."""

    tokens: jax.Array  # [B, D] int32
    logprobs: jax.Array  # [B, D] float32, of the pass that drafted; read only where `final`
    count: jax.Array  # [B] int32, drafted tokens in use
    chance: jax.Array  # [B] float32, how likely each of them is believed to agree, if those before it do
    final: jax.Array  # [B] bool, True where the drafted tokens are results: ordinary sequences on the fast path
    cache: KVCache  # the model's cache as drafting left it; slots past its length hold what verification rewrites
    state: DraftState = NO_DRAFT_STATE  # what the source keeps until the next step

    def appended(self, tokens: jax.Array, committed: jax.Array) -> jax.Array:
        """`tokens [B, max_len]` int32 with what was drafted after the first `committed [B]` of each sequence."""
        B, D = self.tokens.shape
        offset = jnp.arange(D, dtype=jnp.int32)[None, :]
        place = jnp.where(offset < self.count[:, None], committed[:, None] + offset, tokens.shape[1])
        return tokens.at[jnp.arange(B, dtype=jnp.int32)[:, None], place].set(self.tokens, mode="drop")


class Verified(Struct):
    """What the canonical pass says of each sequence: its own choice after the last committed token, and after each guess."""

    targets: jax.Array  # [B, D+1] int32; 0 after guesses that were not read
    logprobs: jax.Array  # [B, D+1] float32, log-probability of each target, raw or processed as its request asks
    drafted: jax.Array  # [B] int32, drafted tokens that were read
    accepted: jax.Array  # [B] int32, leading drafted tokens that equal their targets
    in_pass: jax.Array  # [B] bool, False for sequences that were not verified
    cache: KVCache


def init_counters(num_sequences: int) -> Counters:
    """All counters at zero."""
    return Counters(filled((num_sequences, len(COUNTED)), 0, np.int32))
