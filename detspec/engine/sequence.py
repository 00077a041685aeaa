"""A sample of a request on its way: what is committed, its pages, its text and how it ends, and what goes out of it."""

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from detspec.checkpoint.detokenizer import Detokenizer, TokenBytes
from detspec.checkpoint.load import Model
from detspec.engine.request import (
    ABORTED,
    FAILED,
    FINISH_REASONS,
    GIVEN,
    Completion,
    Likeliest,
    Replay,
    Request,
    Thought,
    TopLogprobs,
    Update,
    completion_digest,
)
from detspec.errors import DivergenceError, shortened
from detspec.generation.commit import ending
from detspec.riders.counters import Stats
from detspec.riders.riding import NOTHING_BROUGHT, Brought
from detspec.sampling_params import all_stop_ids
from detspec.state import STOP

LOG = logging.getLogger("detspec")
NOT_OF_ONE = (jax.errors.JaxRuntimeError, DivergenceError)  # faults of the device, and of processes that share it
MAX_WHY = 500  # characters


def text_of(request: Request, tokens: TokenBytes | None) -> "GrowingText":
    """The text of the new tokens of `request`, none of which was read yet; no stop string ends that of given tokens."""
    detokenizer = Detokenizer(tokens, after=request.prompt_token_ids)
    stop = () if request.given_token_ids else request.sampling.stop
    return GrowingText(detokenizer, stop, min_tokens=request.sampling.min_tokens)


def ending_of(
    request: Request, token_ids: Sequence[int], targets: np.ndarray, logprobs: np.ndarray, model: Model
) -> tuple[int, str | None, str]:
    """Finds where the canonical text of `request` ends that begins with `token_ids`, `n` of them.

    Args:
        request: one sample, or given tokens that are scored.
        token_ids: new tokens, or those that are given.
        targets: `[n + 1]` int32, canonical tokens there and after them; `[n]` if there is no room for more.
        logprobs: float32, their log-probabilities.
        model: the model.

    Returns:
        How many of `token_ids` the text has, its finish reason (None if it goes on after them), and what it says.
    """
    most = request.sampling.max_tokens
    length = min(len(token_ids), most)
    text = text_of(request, model.token_bytes)
    finish_reason: str | None
    if request.given_token_ids:
        finish_reason = FAILED if np.isnan(logprobs).any() else GIVEN
        finish_reason = finish_reason if length == most else None
    else:
        is_stop = np.isin(targets, all_stop_ids(request.sampling, model.eos_ids))
        offered = np.asarray([min(len(targets), most)], np.int32)
        num_taken, finish = ending(is_stop[None, :], logprobs[None, :], offered, np.asarray([most], np.int32))
        is_over = num_taken[0] <= len(token_ids)  # else by the token that follows
        finish_reason = FINISH_REASONS.get(int(finish[0])) if is_over else None
        length = min(length, int(num_taken[0]))
    text.read(token_ids[:length])
    if text.is_stopped:
        return text.num_tokens, FINISH_REASONS[STOP], text.text
    return length, finish_reason, text.whole


class GrowingText:
    """The settled text of new tokens, which ends at the first token whose settled text holds a stop string.

    Tokens are read one at a time, so where a text ends does not depend on when they were looked at.

    Attributes:
        text: the settled text, up to the stop string once there is one.
        num_tokens: tokens that were read; the one that completes a stop string is the last.
        is_stopped: a stop string has ended the text.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        """Begins after what `detokenizer` has read. No string of `stop` that ends within the first `min_tokens` counts."""
        self._detokenizer = detokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self.text = ""
        self.num_tokens = 0
        self.is_stopped = False

    def read(self, tokens: Sequence[int]) -> None:
        """Reads the next `tokens`; those after a stop string are void, and are not read."""
        if not self._stop:
            self.text += self._detokenizer.read(tokens)
            self.num_tokens += len(tokens)
            return
        for token in tokens:
            if self.is_stopped:
                return
            before = len(self.text)
            self.text += self._detokenizer.push(token)
            self.num_tokens += 1
            if self.num_tokens > self._min_tokens:
                self._look(before)

    def _look(self, known: int) -> None:
        """Ends the text in front of a stop string that ends after its first `known` characters, if there is one."""
        found = [self.text.find(string, max(0, known - len(string) + 1)) for string in self._stop]
        if begin := [place for place in found if place >= 0]:
            self.text = self.text[: min(begin)]
            self.is_stopped = True

    @property
    def shown(self) -> str:
        """The part of an unfinished text that will stay: not an end that a stop string may begin with."""
        longest = max(map(len, self._stop), default=0)
        for start in range(max(0, len(self.text) - longest + 1), len(self.text)):
            if any(string.startswith(self.text[start:]) for string in self._stop):
                return self.text[:start]
        return self.text

    @property
    def whole(self) -> str:
        """The text if no token follows: a character that lacks bytes reads as U+FFFD."""
        return self.text if self.is_stopped else self.text + self._detokenizer.rest


@dataclasses.dataclass(eq=False)
class SequenceState:
    """The host's view of one sequence, in a place of the device or waiting for one."""

    request: Request  # one sample of what is asked for
    token_bytes: TokenBytes | None = None  # bytes of the tokenizer's tokens
    outbox: deque[Update] = dataclasses.field(default_factory=deque)  # gets the updates
    streamed: bool = False  # whether updates are wanted before it ends
    brought: Brought = NOTHING_BROUGHT  # checked values for riders
    # prompt and new tokens, as far as the host has fetched them; all committed ones while it waits
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # log-probabilities of the new tokens among `tokens`
    stay: Stats = dataclasses.field(default_factory=Stats)  # counters of this stay in a place
    earlier: Stats = dataclasses.field(default_factory=Stats)  # counters of stays before it was preempted
    committed: int = 0  # as in `GenState`, when the host last looked
    length: int = 0  # as in `GenState`, when the host last looked
    canonical: int = 0  # length of the prefix whose keys and values come from the canonical pass and may be shared
    place: int | None = None  # index in the device's batch, None while it waits
    pages: list[int] = dataclasses.field(default_factory=list)  # cache pages in order
    # Prefix-cache keys of the pages that it has to catch up with, each with the positions that make it true; the trailing
    # partial page has one, too. They are made when they are first asked for, and forgotten with the pages.
    keys: list[tuple[bytes, int]] = dataclasses.field(default_factory=list)
    registered: int = 0  # how many of `keys` have been written
    told: list[Any] = dataclasses.field(default_factory=list)  # by a rider of its prompt, as far as the host has fetched it
    # Findings of the canonical pass about the ended text, if they were asked for; a replay if the request replays.
    found: Likeliest | Replay | None = None
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

    @functools.cached_property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @functools.cached_property
    def limit(self) -> int:
        """`committed` at which it ends."""
        request = self.request
        return self.prompt_len + (len(request.given_token_ids) if self.is_given else request.sampling.max_tokens)

    @functools.cached_property
    def is_given(self) -> bool:
        """Whether its new tokens are given and only read."""
        return self.request.is_given

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Tokens after the prompt."""
        return tuple(self.tokens[self.prompt_len :])

    @property
    def num_new(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_len

    @functools.cached_property
    def shares(self) -> bool:
        """Whether its pages may be shared: not where keys and values are not those of its tokens and a key alone."""
        return self.brought.page_key is not None

    @property
    def stats(self) -> Stats:
        """Counts of what speculation did for it."""
        return self.earlier + self.stay

    @property
    def behind(self) -> int:
        """Committed tokens but the last that the cache lacks."""
        return max(0, self.committed - 1 - self.length)

    def went_on(self, committed: int, length: int, finish: int, stay: Stats) -> None:
        """Takes over what the device reports of it, see `SequenceProgress`."""
        self.committed = committed
        self.length = length
        self.stay = stay
        self.finish_reason = self.finish_reason or FINISH_REASONS.get(finish, "")

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray, told: list[Any]) -> None:
        """Takes over committed tokens from the arrays `[max_len]` of its place, and what a rider found, if there is any yet."""
        new = slice(len(self.tokens), self.committed)
        self.tokens.extend(tokens[new].tolist())
        self.logprobs.extend(logprobs[new].tolist())
        self.told = told or self.told

    def read_text(self) -> None:
        """Reads the text of the new tokens that `text` has not read yet."""
        self.text.read(self.tokens[self.prompt_len + self.text.num_tokens :])

    def read_given(self) -> None:
        """Takes over its given tokens: passes over all of them were started."""
        self.tokens.extend(self.request.given_token_ids)
        self.committed = len(self.tokens)
        self.length = self.committed - 1

    def take(self, found: Likeliest | Replay) -> None:
        """Takes over what the canonical pass says of its given tokens, and ends."""
        self.finish_reason = GIVEN
        self.found = found
        if isinstance(found, Replay):
            return
        self.logprobs = found[0][self.prompt_len : self.committed].tolist()
        self.found = found if wants_replay(self.request) else None
        if np.isnan(self.logprobs).any():
            self.finish_reason = FAILED

    def end_at_stop_string(self) -> None:
        """Ends if its text holds a stop string; new tokens after the one that completes it are void, and are dropped."""
        if self.request.sampling.stop:
            self.read_text()
            if self.text.is_stopped:
                self._cut(self.text.num_tokens)
                self.finish_reason = FINISH_REASONS[STOP]

    def abort(self) -> None:
        """Ends with what is committed and fetched; of a given text that is nothing."""
        if self.is_given:
            self._cut(0)
        self.end_at_stop_string()
        self.told = []  # the prompt may not have been read to its end
        self.finish_reason = ABORTED

    def _cut(self, num_new: int) -> None:
        """Drops all but the first `num_new` new tokens."""
        del self.tokens[self.prompt_len + num_new :], self.logprobs[num_new:]

    def enter(self, place: int, pages: list[int], *, length: int) -> None:
        """Gets a place and `pages`, which hold its first `length` positions."""
        self.place = place
        self.pages = pages
        self.length = length
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
        """Ends its stay in a place; there will be another one."""
        self.earlier = self.stats
        self.stay = Stats()


def wants_replay(request: Request) -> bool:
    """Whether `request` asks for log-probabilities other than those of its new tokens."""
    return request.sampling.logprobs > 0 or request.sampling.prompt_logprobs is not None


def asked_from(request: Request) -> int:
    """The first position that a replay of `request` has to say something about."""
    return len(request.prompt_token_ids) if request.sampling.prompt_logprobs is None else 0


def asked_logprobs(
    request: Request, num_tokens: int, likeliest: Likeliest | Replay | None
) -> tuple[tuple[TopLogprobs, ...], tuple[float | None, ...], tuple[TopLogprobs, ...]]:
    """The parts of what was found of a text of `num_tokens` that `request` asks for; all empty if `likeliest` is None.

    They are `top_logprobs`, `prompt_logprobs` and `prompt_top_logprobs` of a `Completion`.
    """
    if likeliest is None or isinstance(likeliest, Replay):
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


def update_of(sequence: SequenceState, model: Model, context: str) -> Update:
    """Makes an update of what is new of `sequence`; `context` digests all that bits depend on besides the request."""
    if isinstance(sequence.found, Replay):
        return Update(sequence.request, (), (), "", without_text(sequence, replay=sequence.found))
    completion = None
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


def without_text(sequence: SequenceState, *, replay: Replay | None = None, error: str = "") -> Completion:
    """The completion of a sequence that only replays a record, or has failed."""
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
        logprobs_mode=request.sampling.logprobs_mode,
        error=error,
        replay=replay,
    )


def complete(sequence: SequenceState, text: str, context: str, model: Model) -> Completion:
    """The completion of a sequence that has ended with `text`."""
    request = sequence.request
    asked = asked_logprobs(request, len(sequence.tokens), sequence.found)
    logprobs = np.asarray(sequence.logprobs, np.float32)
    return Completion(
        id=request.id,
        index=request.index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=sequence.new_tokens,
        logprobs=tuple(sequence.logprobs),
        text=text,
        finish_reason=sequence.finish_reason,
        digest=completion_digest(request, sequence.new_tokens, logprobs, sequence.told, context, sequence.brought.facts),
        stats=sequence.stats,
        logprobs_mode=request.sampling.logprobs_mode,
        top_logprobs=asked[0],
        prompt_logprobs=asked[1],
        prompt_top_logprobs=asked[2],
        thoughts=tuple(decode_thought(each, model) for each in sequence.told) if model.cfg.thinking is not None else (),
    )


def decode_thought(token_ids: list[int], model: Model) -> Thought:
    """A thought of `model` as it goes out."""
    assert model.cfg.thinking is not None
    ended = token_ids[-1] == model.cfg.thinking.end_id
    return Thought(model.decode(token_ids[:-1] if ended else token_ids), tuple(token_ids), is_cut=not ended)


def failed(sequence: SequenceState, error: Exception) -> Update:
    """The last update of `sequence`, which `error` has ended; the traceback goes into the log, under the request's id."""
    LOG.error("request %s failed, the others go on", sequence.request.id, exc_info=error)
    sequence.finish_reason = FAILED
    completion = without_text(sequence, error=shortened(f"{type(error).__name__}: {error}", MAX_WHY))
    return Update(sequence.request, (), (), "", completion)
