"""A sample of a request on its way: what is committed, the pages that it holds, how it ends, and what goes out of it."""

import dataclasses
import functools
import logging
from collections import deque
from typing import Any

import jax
import numpy as np

from detspec.checkpoint.detokenizer import TokenBytes
from detspec.checkpoint.load import Model
from detspec.engine.request import (
    FAILED,
    FINISH_REASONS,
    GIVEN,
    Completion,
    Likeliest,
    Replay,
    Request,
    Stats,
    Thought,
    TopLogprobs,
    Update,
    completion_digest,
)
from detspec.engine.text import GrowingText, text_of
from detspec.errors import DivergenceError, shortened
from detspec.riders.asked import NOTHING_BROUGHT, Brought
from detspec.state import LENGTH, NOT_FINITE, RUNNING, STOP

LOG = logging.getLogger("detspec")
NOT_OF_ONE = (jax.errors.JaxRuntimeError, DivergenceError)  # faults of the device, and of processes that share it
MAX_WHY = 500  # characters


@dataclasses.dataclass(eq=False)
class SequenceState:
    """The host's view of one sequence, in a place of the device or waiting for one."""

    request: Request  # one sample of what is asked for
    token_bytes: TokenBytes | None = None  # of the model's tokenizer
    outbox: deque[Update] = dataclasses.field(default_factory=deque)  # where its updates go
    streamed: bool = False  # whether updates are wanted before it ends
    brought: Brought = NOTHING_BROUGHT  # what riders say of what it brings
    # prompt and new tokens, as far as the host has fetched them; all committed ones while it waits
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # log-probabilities of the new tokens among `tokens`
    stay: Stats = dataclasses.field(default_factory=Stats)  # counters of this stay in a place
    earlier: Stats = dataclasses.field(default_factory=Stats)  # counters of stays before it was preempted
    committed: int = 0  # as in `GenState`, when the host last looked
    length: int = 0  # as in `GenState`, when the host last looked
    canonical: int = 0  # length of the prefix whose keys and values come from the canonical pass and may be shared
    place: int | None = None  # index in the device's batch, None while it waits
    pages: list[int] = dataclasses.field(default_factory=list)  # its pages in order
    # prefix-cache keys of what it has to catch up with: `num_whole` full pages, then one for the trailing partial page. They
    # are made when they are first asked for, and forgotten with the pages.
    keys: list[bytes] = dataclasses.field(default_factory=list)
    num_whole: int = 0
    registered: int = 0  # how many of `keys` have been written
    found: list[Any] = dataclasses.field(default_factory=list)  # by a rider in its prompt, as far as the host has fetched it
    likeliest: Likeliest | None = None  # what the canonical pass says of its text; set once it has ended, if it was asked for
    replay: Replay | None = None  # what came of a request that replays
    finish: int = RUNNING  # as in `GenState`, when the host last looked
    finish_reason: str = ""  # why it ended; "" while it goes on
    num_sent: int = 0  # new tokens that earlier updates held
    num_shown: int = 0  # characters that they held

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.committed = len(self.tokens)

    @functools.cached_property
    def text(self) -> GrowingText:
        """The text of the new tokens, as far as it was read."""
        return text_of(self.request, self.token_bytes)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def limit(self) -> int:
        """`committed` at which it ends."""
        request = self.request
        return self.prompt_len + (len(request.given_token_ids) if request.is_given else request.sampling.max_tokens)

    @property
    def is_given(self) -> bool:
        """Whether its new tokens are given and only read."""
        return self.request.is_given

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Tokens after the prompt."""
        return tuple(self.tokens[self.prompt_len :])

    @property
    def num_new(self) -> int:
        """How many they are."""
        return len(self.tokens) - self.prompt_len

    @property
    def shares(self) -> bool:
        """Whether its pages may be shared: not where keys and values are not those of its tokens and a key alone."""
        return self.brought.page_key is not None

    @property
    def stats(self) -> Stats:
        """What speculation did for it."""
        return self.earlier + self.stay

    @property
    def behind(self) -> int:
        """Committed tokens but the last that the cache lacks."""
        return max(0, self.committed - 1 - self.length)

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Takes over committed tokens from the arrays `[max_len]` of its place."""
        new = slice(len(self.tokens), self.committed)
        self.tokens.extend(tokens[new].tolist())
        self.logprobs.extend(logprobs[new].tolist())

    def read_text(self) -> None:
        """Reads the text of the new tokens that `text` has not read yet."""
        self.text.read(self.tokens[self.prompt_len + self.text.num_tokens :])

    def read_given(self) -> None:
        """Takes over its given tokens: passes over all of them were started."""
        self.tokens.extend(self.request.given_token_ids)
        self.committed = len(self.tokens)
        self.length = self.committed - 1

    def take_scores(self, likeliest: Likeliest) -> None:
        """Takes over what the canonical pass says of its given tokens, and ends."""
        self.logprobs = likeliest[0][self.prompt_len : self.committed].tolist()
        self.likeliest = likeliest if wants_replay(self.request) else None
        self.finish = NOT_FINITE if np.isnan(self.logprobs).any() else LENGTH
        self.finish_reason = FINISH_REASONS[NOT_FINITE] if self.finish == NOT_FINITE else GIVEN

    def take_replay(self, replay: Replay) -> None:
        """Takes over what the canonical pass has in the places of its given tokens, and ends."""
        self.replay = replay
        self.finish = LENGTH
        self.finish_reason = GIVEN

    def cut(self, num_new: int) -> None:
        """Drops all but the first `num_new` new tokens."""
        del self.tokens[self.prompt_len + num_new :], self.logprobs[num_new:]

    def enter(self, place: int, pages: list[int], *, length: int, num_whole: int) -> None:
        """Gets a place and `pages`, which hold its first `length` positions; `num_whole` of its keys name full pages."""
        self.place = place
        self.pages = pages
        self.length = length
        self.num_whole = num_whole
        self.registered = 0
        # An ordinary sequence's new tokens come from the fast path; what it has to catch up with does not.
        is_canonical = self.is_given or self.request.sampling.deterministic
        self.canonical = self.limit if is_canonical else self.committed - 1

    def leave(self) -> None:
        """Has neither place nor pages any more."""
        self.place = None
        self.pages = []
        self.keys = []
        self.length = 0

    def preempt(self) -> None:
        """Its stay in a place is over, and there will be another one."""
        self.earlier = self.stats
        self.stay = Stats()


def wants_replay(request: Request) -> bool:
    """Whether `request` asks for log-probabilities other than those of its new tokens."""
    return request.sampling.logprobs > 0 or request.sampling.prompt_logprobs is not None


def asked_from(request: Request) -> int:
    """The first position that a replay of `request` has to say something about."""
    return len(request.prompt_token_ids) if request.sampling.prompt_logprobs is None else 0


def asked_logprobs(
    request: Request, num_tokens: int, likeliest: Likeliest | None
) -> tuple[tuple[TopLogprobs, ...], tuple[float | None, ...], tuple[TopLogprobs, ...]]:
    """The parts of what was found of a text of `num_tokens` that `request` asks for; all empty if `likeliest` is None.

    They are `top_logprobs`, `prompt_logprobs` and `prompt_top_logprobs` of a `Completion`.
    """
    if likeliest is None:
        return (), (), ()
    logprobs, top_ids, top_logprobs = likeliest

    def top(position: int, number: int) -> TopLogprobs:
        pairs = zip(top_ids[position].tolist(), top_logprobs[position].tolist(), strict=True)
        return tuple(pairs)[: number if position else 0]

    prompt_len = len(request.prompt_token_ids)
    number = request.sampling.logprobs
    prompt_number = request.sampling.prompt_logprobs
    new = tuple(top(p, number) for p in range(prompt_len, num_tokens)) if number else ()
    if prompt_number is None:
        return new, (), ()
    of_prompt = tuple(None if p == 0 else float(logprobs[p]) for p in range(prompt_len))
    return new, of_prompt, tuple(top(p, prompt_number) for p in range(prompt_len)) if prompt_number else ()


def end_if_done(sequence: SequenceState) -> None:
    """Sets `finish_reason` if the device ended `sequence`, or if its text holds a stop string.

    New tokens must have been fetched if there are stop strings. Those after the one that completes a stop string are void and
    are dropped.
    """
    if sequence.finish != RUNNING:
        sequence.finish_reason = FINISH_REASONS[sequence.finish]
    if sequence.request.sampling.stop:
        sequence.read_text()
        if sequence.text.is_stopped:
            sequence.cut(sequence.text.num_tokens)
            sequence.finish_reason = FINISH_REASONS[STOP]


def update_of(sequence: SequenceState, model: Model, context: str) -> Update:
    """What is new of `sequence` since its last update; `context` digests all that bits depend on besides the request."""
    completion = None
    if sequence.replay is not None:
        return Update(sequence.request, (), (), "", replayed(sequence))
    sequence.read_text()
    if sequence.finish_reason:
        shown = sequence.text.whole
        completion = complete(sequence, shown, context, model)
    else:
        shown = sequence.text.shown
    start = sequence.num_sent
    tokens = tuple(sequence.tokens[sequence.prompt_len + start :])
    piece = shown[sequence.num_shown :]
    sequence.num_sent = sequence.num_new
    sequence.num_shown = max(sequence.num_shown, len(shown))
    return Update(sequence.request, tokens, tuple(sequence.logprobs[start:]), piece, completion)


def replayed(sequence: SequenceState) -> Completion:
    """The completion of a sequence that only replays a record."""
    request = sequence.request
    return Completion(
        id=request.id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=(),
        logprobs=(),
        text="",
        finish_reason=sequence.finish_reason,
        digest="",
        stats=sequence.stats,
        index=request.index,
        replay=sequence.replay,
    )


def complete(sequence: SequenceState, text: str, context: str, model: Model) -> Completion:
    """The completion of a sequence that has ended with `text`."""
    request = sequence.request
    asked = asked_logprobs(request, len(sequence.tokens), sequence.likeliest)
    logprobs = np.asarray(sequence.logprobs, np.float32)
    return Completion(
        id=request.id,
        index=request.index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=sequence.new_tokens,
        logprobs=tuple(sequence.logprobs),
        text=text,
        finish_reason=sequence.finish_reason,
        digest=completion_digest(request, sequence.new_tokens, logprobs, sequence.found, context, sequence.brought.facts),
        stats=sequence.stats,
        logprobs_mode=request.sampling.logprobs_mode,
        top_logprobs=asked[0],
        prompt_logprobs=asked[1],
        prompt_top_logprobs=asked[2],
        thoughts=tuple(decode_thought(token_ids, model) for token_ids in sequence.found),
    )


def decode_thought(token_ids: list[int], model: Model) -> Thought:
    """A thought of `model` as it goes out."""
    assert model.cfg.thinking is not None
    ended = token_ids[-1] == model.cfg.thinking.end_id
    return Thought(model.decode(token_ids[:-1] if ended else token_ids), tuple(token_ids), is_cut=not ended)


def failed(sequence: SequenceState, error: Exception) -> Update:
    """The last update of `sequence`, which `error` has ended; the traceback goes into the log, under the request's id."""
    request = sequence.request
    LOG.error("request %s failed, the others go on", request.id, exc_info=error)
    completion = Completion(
        id=request.id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=(),
        logprobs=(),
        text="",
        finish_reason=FAILED,
        digest="",
        stats=sequence.stats,
        index=request.index,
        logprobs_mode=request.sampling.logprobs_mode,
        error=shortened(f"{type(error).__name__}: {error}", MAX_WHY),
    )
    return Update(request, (), (), "", completion)
