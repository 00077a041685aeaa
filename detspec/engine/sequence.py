"""One sample of a request on its way: what is committed, the pages that it holds, and how it ended."""

import dataclasses
import functools
from collections import deque

import numpy as np

from detspec.checkpoint.detokenizer import TokenBytes
from detspec.engine.request import FINISH_REASONS, GIVEN, Likeliest, Replay, Request, Stats, TopLogprobs, Update
from detspec.engine.text import GrowingText, text_of
from detspec.state import LENGTH, NOT_FINITE, RUNNING


@dataclasses.dataclass(eq=False)
class SequenceState:
    """The host's view of one sequence, in a place of the device or waiting for one."""

    request: Request  # one sample of what is asked for
    token_bytes: TokenBytes | None = None  # of the model's tokenizer
    outbox: deque[Update] = dataclasses.field(default_factory=deque)  # where its updates go
    streamed: bool = False  # whether updates are wanted before it ends
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
    # token ids of the thought after each chunk of the prompt, as far as the host has fetched them
    thoughts: list[list[int]] = dataclasses.field(default_factory=list)
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
    def thinks(self) -> bool:
        """Whether its prompt is read with thoughts: then its keys and values are not those of its tokens alone."""
        return self.request.sampling.thinking is True

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
