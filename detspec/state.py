"""State of a generator: windows of a pass, drafts, verdicts, and the sequences between steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from detspec.cache import KVCache
from detspec.riders.counters import Counters
from detspec.riders.rider import AdaptFn
from detspec.riders.riding import Riders
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


class Riding(NamedTuple):
    """Parts of a pass that come from riders."""

    inject: Injected | None = None  # vectors that are added to the stream
    adapt_fn: AdaptFn | None = None  # changes the products of the layers


# Fields with a column of their own, in this order; after it come stop tokens, biased tokens and their biases.
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


class DraftState(Struct):
    """State of a draft source between steps: for example the cache of a draft model."""

    sequences: Any = ()  # leaves [B, ...], gathered and put back together with their sequences
    shared: Any = ()  # passed along whole: page pools


NO_DRAFT_STATE = DraftState()


class GenState(Struct):
    """The whole state of a batch between two steps.

    Invariant for every sequence that is live and prefilled: `cache.length == committed - 1`. The keys and values of all
    committed tokens but the last are in the cache, and the last one is the next input. Sequences that lack more are
    catching up: they commit nothing, and passes take spans of them along.
    """

    tokens: jax.Array  # [B, max_len] int32, prompt and committed tokens, then PAD_ID
    logprobs: jax.Array  # [B, max_len] float32, of committed tokens; 0 for the prompt
    committed: jax.Array  # [B] int32, number of final tokens, prompt included
    limit: jax.Array  # [B] int32, `committed` at which the sequence ends
    live: jax.Array  # [B] bool
    finish: jax.Array  # [B] int32, RUNNING, STOP, LENGTH or NOT_FINITE
    deterministic: jax.Array  # [B] bool, False commits from the fast path unverified
    riders: Riders  # values of requests: sampling parameters, counters and others
    cache: KVCache  # keys and values in pages, and their length
    draft: DraftState = NO_DRAFT_STATE  # belongs to the draft source of the program that runs

    @property
    def sampling(self) -> SamplingArrays:
        """Sampling parameters of each sequence."""
        return self.riders.of("sampling")

    @property
    def counters(self) -> Counters:
        """Counts of speculation for each sequence."""
        return self.riders.of("counters")

    def having(self, **states: Any) -> "GenState":
        """Returns this state with other states of some riders, by their names."""
        return self.replace(riders=self.riders.having(**states))

    def with_processing(self, processing: bool) -> "GenState":
        """Returns this state for programs with or without logits processing, see `Riders`."""
        return self.replace(riders=self.riders.replace(processing=processing))

    @property
    def ready(self) -> jax.Array:
        """`[B]` bool, live sequences that have caught up, so that the last committed token is the next input."""
        return self.live & (self.cache.length >= self.committed - 1)

    @property
    def catching_up(self) -> jax.Array:
        """`[B]` bool, live sequences whose tokens any pass may take: all but those whose prompts a rider still reads."""
        unread = self.riders.unread
        return self.live if unread is None else self.live & ~unread

    def riding(self, windows: Windows) -> Riding:
        """Collect what riders put into a pass over `windows`."""
        return Riding(self.riders.inject(windows), self.riders.adapt_fn(windows))


class Draft(Struct):
    """Drafted next tokens of each sequence, with the cache and the source's state as drafting left them."""

    tokens: jax.Array  # [B, D] int32
    logprobs: jax.Array  # [B, D] float32, of the pass that drafted; read only where `final`
    count: jax.Array  # [B] int32, drafted tokens in use
    chance: jax.Array  # [B] float32, how likely each of them is believed to agree, if those before it do
    final: jax.Array  # [B] bool, True where the drafted tokens are results: ordinary sequences on the fast path
    cache: KVCache  # the model's cache as drafting left it; slots past its length hold what verification rewrites
    state: DraftState = NO_DRAFT_STATE  # state of the source for the next step

    def appended(self, tokens: jax.Array, committed: jax.Array) -> jax.Array:
        """`tokens [B, max_len]` int32 with what was drafted after the first `committed [B]` of each sequence."""
        B, D = self.tokens.shape
        offset = jnp.arange(D, dtype=jnp.int32)[None, :]
        place = jnp.where(offset < self.count[:, None], committed[:, None] + offset, tokens.shape[1])
        return tokens.at[jnp.arange(B, dtype=jnp.int32)[:, None], place].set(self.tokens, mode="drop")


class Verified(Struct):
    """Verdict of the canonical pass on each sequence: its own choice after the last committed token, and after each draft."""

    targets: jax.Array  # [B, D+1] int32; 0 after drafts that were not read
    logprobs: jax.Array  # [B, D+1] float32, log-probability of each target, raw or processed as its request asks
    drafted: jax.Array  # [B] int32, drafted tokens that were read
    accepted: jax.Array  # [B] int32, leading drafted tokens that equal their targets
    in_pass: jax.Array  # [B] bool, False for sequences that were not verified
    cache: KVCache
