"""A rider: something that requests bring along, declared once as a tuple of pure functions.

    on the host      facts, page_key    what is brought, checked, for digests; and for the keys of shared pages
                     pack               what some requests bring, as arrays of numpy
    on the device    init, begin        the state `[B, ...]` of all sequences, and of those that get a request
                     linear, logits     what it makes of products with weights in token rows, and of their logits
                     follow, observe    its state after one more token of the text, and after a step
                     reader             reads a part of the prompt itself, and may put something into the stream

Bits must not depend on drafts, places or neighbours. So what a rider says of a row is a function of its request and of the text
before the row. A rider that follows the text, such as a grammar, gets this for nothing: it says what one token changes, and
passes, drafts, rollbacks, preemptions and replays all walk along the text by that.

    text                    prompt | a b c        `begin` gives s0 before a; `follow` gives s1 after a, s2 after b, s3 after c
    a pass, drafts d e                     d e    its rows get s3, s4 after d and s5 after e
    d is right, e is wrong                 d f    the state is `follow(s4, f)`
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from detspec.config import ModelConfig
from detspec.schedule import Schedule

NOTHING: Mapping[str, Any] = MappingProxyType({})
TextsFn = Callable[[], jax.Array]  # makes the texts `[X, T]` int32 of rows: `R / X` rows that follow each other have one
State = Any  # a pytree of arrays `[B, ...]`, or `[R, ...]` of token rows
Shared = Any  # a pytree of arrays that all sequences share


class Entry(NamedTuple):
    """A request for one sequence of a state.

    A request that was taken out half way goes on where it stopped if its new tokens so far come with its prompt.
    """

    place: int  # which sequence of the state
    tokens: Sequence[int]  # token ids to commit
    sampling: Any  # `SamplingParams`: what the request asks for
    prompt_len: int | None = None  # how many of `tokens` are the prompt, the rest being new tokens; all if None
    logprobs: Sequence[float] = ()  # log-probabilities of the new tokens among `tokens`; 0 where they are missing
    length: int = 0  # how many positions its pages hold already, less than `tokens`
    brings: Mapping[str, Any] = NOTHING  # values for riders, by their names

    @property
    def prompt(self) -> Sequence[int]:
        """The part of `tokens` that is the prompt."""
        return self.tokens[: self.prompt_len]


class Capacity(NamedTuple):
    """How much a state holds."""

    num_sequences: int  # B
    max_len: int  # positions of a sequence
    max_stop_ids: int  # stop tokens of a request
    max_logit_bias: int  # biased tokens of a request
    schedule: Schedule  # schedule of the canonical pass


class Rows(NamedTuple):
    """Token rows whose logits a rider works on."""

    state: State  # [R, ...], the rider's state before the token that each row chooses
    position: jax.Array  # [R] int32, the position that this token will have
    texts_fn: TextsFn  # makes the texts; places from the first choice on hold drafts, and places from the last on nothing


class Product(NamedTuple):
    """A product of token rows with a weight of a layer."""

    layer: int
    name: str  # of the weight, such as "down"
    x: jax.Array  # [R, n]
    y_f32: jax.Array  # [R, m]
    # `(x [R, k], weights [j, k], ...) -> float32 [R, j], ...`: products of the same rows, summed in the order of the pass
    products_f32: Callable[..., tuple[jax.Array, ...]]


AdaptFn = Callable[[Product], jax.Array]  # what riders make of a product, [R, m]


class Committed(NamedTuple):
    """Tokens that a step has committed."""

    tokens: jax.Array  # [B, n] int32
    num_new: jax.Array  # [B] int32, how many of them were committed
    verified: Any  # `Verified`, what the canonical pass said; None of ordinary decoding


class Reader(NamedTuple):
    """How a rider reads a part of each prompt itself, by canonical passes; `state` is a `GenState`, `own` the rider's state."""

    # `(params, cfg, state, new, schedule, max_passes) -> state`; `new [B]` bool are the sequences that were just put in
    read: Callable[..., Any]
    # `own -> [B]` bool, sequences whose prompts it has not read to its end: no other pass may take their tokens
    unread: Callable[[State], jax.Array]
    # `(own, windows) -> Injected`, what is added to the stream
    inject: Callable[[State, Any], Any]
    # `request -> bool`, whether it reads the prompt of a checked request; such prompts share no pages
    reads: Callable[[Any], bool]
    # `own -> [B, ...]`, what the host is told
    report: Callable[[State], jax.Array]
    # `(cfg, told, prompt_len, length) -> list` of what was found in the first `length` positions, JSON values. It is part of
    # the completion's digest, and comes back as what the request brings if it was preempted.
    found: Callable[..., list[Any]]
    # `(cfg, prompt_len, length) -> int`, passes that one sequence takes at most, of which `length` positions have been read
    passes: Callable[[ModelConfig, int, int], int]
    # `(cfg, own, b) -> value`, for certification: what was found of sequence `b`, spoilt here and there, as a request brings it
    spoilt: Callable[[ModelConfig, State, int], Any]
    # `(own, b, other, place) -> str`: where two readings of sequence `b`, in `place` of the other one, differ; "" if nowhere
    difference: Callable[[State, int, State, int], str]


def brings_nothing(value: Any) -> Any:
    """`Rider.facts` of a rider that takes no values from users."""
    raise NotImplementedError


def packs_nothing(like: State, entries: Sequence[Entry], eos_ids: Sequence[int]) -> Any:
    """`Rider.pack` of a rider to which nothing is brought."""
    return ()


def as_packed(packed: State, like: State) -> State:
    """`Rider.begin` of a rider whose first state is what was packed."""
    return packed


def shares_pages(request: Any) -> bytes | None:
    """`Rider.page_key` of a rider that changes no keys and values."""
    return b""


def shares_nothing(cfg: ModelConfig) -> Shared:
    """`Rider.shared` of a rider without tables or weights."""
    return ()


class Rider(NamedTuple):
    """A feature that requests bring values for. Static and hashable: module-level functions, `init` and at least one more."""

    name: str  # requests bring values under this name
    # `(cfg, capacity) -> state [B, ...]`, in numpy or on the device, of sequences that bring nothing
    init: Callable[[ModelConfig, Capacity], State]
    # `(like, entries, eos_ids) -> packed [n, ...]` of numpy, what each entry brings, in the shapes of the state `like`;
    # `eos_ids` are the model's end-of-sequence tokens. Elements have four bytes, or are bool. The prompt is `entry.prompt`.
    pack: Callable[[State, Sequence[Entry], Sequence[int]], Any] = packs_nothing
    # `(packed [B, ...], like) -> state [B, ...]` before the first new token
    begin: Callable[[Any, State], State] = as_packed
    # `value -> JSON value`, what a request brings, for digests; raises `InputError` for a value that it does not take
    facts: Callable[[Any], Any] = brings_nothing
    # `request -> key`, what keys and values depend on besides tokens; None if its pages are shared with no other request
    page_key: Callable[[Any], bytes | None] = shares_pages
    # `cfg -> arrays` that all sequences share, such as tables
    shared: Callable[[ModelConfig], Shared] = shares_nothing
    # `(shared, rows, logits_f32 [R, V]) -> [R, V]`. No row may depend on another, and those of requests that bring nothing stay
    # as they are: where no request asks for more than a temperature, programs leave this out.
    logits: Callable[[Shared, Rows, jax.Array], jax.Array] | None = None
    # `(shared, state [R, ...], product) -> [R, m]`, what it makes of the products of layers. No row may depend on another, and
    # those of requests that bring nothing stay as they are. Its state must not change with the text; keys and values depend on
    # it, so `page_key` must name it.
    linear: Callable[[Shared, State, Product], jax.Array] | None = None
    # `(shared, state [n, ...], tokens [n]) -> state` after one more new token
    follow: Callable[[Shared, State, jax.Array], State] | None = None
    # `(state, committed) -> state` after a step
    # Such a state begins anew after a preemption, and drafts of the same pass do not show in it: logits that depend on the text
    # need `follow`.
    observe: Callable[[State, Committed], State] | None = None
    reader: Reader | None = None  # how it reads prompts

    @property
    def takes_values(self) -> bool:
        """Whether users may bring values for it."""
        return self.facts is not brings_nothing

    @property
    def changes(self) -> bool:
        """Whether steps change its state."""
        return self.follow is not None or self.observe is not None or self.reader is not None

    def __repr__(self) -> str:
        """Shows the name alone: the text must be equal in all processes, because files of compiled programs are found by it."""
        return f"Rider({self.name!r})"
