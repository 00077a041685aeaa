"""One sample of a request on its way: what is committed of it, and the pages that it holds."""

import dataclasses

import numpy as np

from detspec.engine.request import Request, Stats, TopLogprobs


@dataclasses.dataclass(eq=False)
class SequenceState:
    """The host's view of one row, or of a request that waits for one.

    Attributes:
        request: what is asked for; one sample of it.
        tokens: prompt and new tokens, as far as the host has read them. All committed ones while it waits.
        logprobs: of the new tokens among `tokens`.
        stay: counters of this stay in a row; `earlier` those of stays before it was preempted.
        committed, length: as in `GenState`, when the host last looked.
        canonical: positions that the canonical pass has written or will write before any other does.
        row: where it is, None while it waits.
        pages: its pages in order.
        keys: of the pages of what it has to catch up with: `num_whole` whole ones, and behind them one for the partial page.
            Worked out when they are first asked for, and forgotten with the pages.
        thoughts: token ids of what was thought after each chunk of the prompt, as far as the host has read them.
        replayed: what the canonical pass says of its text, entry `p` about the token at position `p`: log-probability of the
            token, likeliest ids, their log-probabilities. Read once it has ended, if it was asked for.
        registered: how many of `keys` have been written.
    """

    request: Request
    tokens: list[int]
    logprobs: list[float] = dataclasses.field(default_factory=list)
    stay: Stats = dataclasses.field(default_factory=Stats)
    earlier: Stats = dataclasses.field(default_factory=Stats)
    committed: int = 0
    length: int = 0
    canonical: int = 0
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    num_whole: int = 0
    registered: int = 0
    thoughts: list[list[int]] = dataclasses.field(default_factory=list)
    replayed: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def limit(self) -> int:
        """`committed` at which it ends."""
        return self.prompt_len + self.request.sampling.max_tokens

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Those after the prompt."""
        return tuple(self.tokens[self.prompt_len :])

    @property
    def thinks(self) -> bool:
        """Whether its prompt is read thinking: then its keys and values are not those of its tokens alone."""
        return self.request.sampling.thinking is True

    @property
    def wants_replay(self) -> bool:
        """Whether log-probabilities are asked for besides those of the new tokens."""
        sampling = self.request.sampling
        return sampling.logprobs > 0 or sampling.prompt_logprobs is not None

    @property
    def stats(self) -> Stats:
        """What speculation did for it."""
        return self.earlier + self.stay

    @property
    def behind(self) -> int:
        """Committed tokens but the last that the cache lacks."""
        return max(0, self.committed - 1 - self.length)

    def read(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Takes over committed tokens from its row's arrays `[max_len]`."""
        new = slice(len(self.tokens), self.committed)
        self.tokens.extend(tokens[new].tolist())
        self.logprobs.extend(logprobs[new].tolist())

    def cut(self, num_new: int) -> None:
        """Drops all but the first `num_new` new tokens."""
        del self.tokens[self.prompt_len + num_new :], self.logprobs[num_new:]


def first_sample(request: Request) -> SequenceState:
    """A request that nothing is known of but its prompt."""
    return SequenceState(request, list(request.prompt_token_ids), committed=len(request.prompt_token_ids))


def asked_logprobs(sample: SequenceState) -> tuple[tuple[TopLogprobs, ...], tuple[float | None, ...], tuple[TopLogprobs, ...]]:
    """What `sample` asks for of its `replayed` text: see `Completion`, the attributes that end in `logprobs`."""
    if sample.replayed is None:
        return (), (), ()
    logprobs, top_ids, top_logprobs = sample.replayed

    def likeliest(position: int, number: int) -> TopLogprobs:
        pairs = zip(top_ids[position].tolist(), top_logprobs[position].tolist(), strict=True)
        return tuple(pairs)[: number if position else 0]

    sampling, prompt_len = sample.request.sampling, sample.prompt_len
    number, prompt_number = sampling.logprobs, sampling.prompt_logprobs
    new = tuple(likeliest(p, number) for p in range(prompt_len, len(sample.tokens))) if number else ()
    if prompt_number is None:
        return new, (), ()
    of_prompt = tuple(None if p == 0 else float(logprobs[p]) for p in range(prompt_len))
    return new, of_prompt, tuple(likeliest(p, prompt_number) for p in range(prompt_len)) if prompt_number else ()
