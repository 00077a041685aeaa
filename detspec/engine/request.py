"""A request, and what comes of it: updates, completions, thoughts and replays."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from detspec.errors import InputError, shown
from detspec.plain import plain_ids
from detspec.riders.counters import Stats
from detspec.riders.rider import NOTHING
from detspec.sampling_params import SamplingParams
from detspec.state import LENGTH, NOT_FINITE, STOP

FINISH_REASONS = {STOP: "stop", LENGTH: "length", NOT_FINITE: "error"}
ABORTED = "abort"
GIVEN = "given"
FAILED = FINISH_REASONS[NOT_FINITE]
TopLogprobs = tuple[tuple[int, float], ...]
# Canonical findings about a text, entry `p` about the token at position `p`: log-probability of the token [T], likeliest
# ids [T, k] and their log-probabilities [T, k].
Likeliest = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it.

    Token ids may be in a list, a tuple, a range or an array of numpy, jax or their like; they become tuples of plain integers.

    Attributes:
        id: name of the request in outputs and errors.
        prompt_token_ids: the prompt, at least one token.
        sampling: how it is continued.
        index: number of the sample, once a request of several samples has been parted into them; 0 before.
        given_token_ids: tokens after the prompt, to be scored; if there are any, nothing is generated.
        replays: the given tokens, maybe none, are a record of the request: what the canonical pass has in their places goes out
            as `Completion.replay`, and nothing else.
        brings: values for the engine's riders, by their names.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    index: int = 0
    given_token_ids: tuple[int, ...] = ()
    replays: bool = False
    brings: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def is_given(self) -> bool:
        """Whether its new tokens are given, and nothing is generated."""
        return self.replays or bool(self.given_token_ids)

    @property
    def needs_processing(self) -> bool:
        """Whether it asks for more than a temperature."""
        return self.sampling.needs_processing or bool(self.brings)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", plain_ids(self.prompt_token_ids))
        object.__setattr__(self, "given_token_ids", plain_ids(self.given_token_ids, "given_token_ids"))
        if not isinstance(self.brings, Mapping | None):
            raise InputError(f"brings must map names of riders to values, {{'name': value}}, got {shown(self.brings)}")
        object.__setattr__(self, "brings", dict(self.brings or {}))

    def samples(self) -> "Iterator[Request]":
        """The `n` samples that it asks for, as requests of one sample each: sample `i` has the seed `seed + i`."""
        if self.sampling.n == 1:
            yield self
            return
        for index in range(self.sampling.n):
            sampling = dataclasses.replace(self.sampling, n=1, seed=self.sampling.seed + index)
            yield dataclasses.replace(self, sampling=sampling, index=index)


@dataclasses.dataclass(frozen=True)
class Thought:
    """A thought of a model after one chunk of the prompt.

    Attributes:
        text: without the token that ends it; "" for nothing.
        token_ids: tokens of the thought, the one that ends it included.
        is_cut: it did not end within `ThinkingConfig.max_thought` tokens; its last one was taken for the end.
    """

    text: str
    token_ids: tuple[int, ...]
    is_cut: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """Findings of the canonical pass about one recorded completion of `n` tokens, and of the token that would follow them.

    Attributes:
        targets: int32 `[n + 1]`, what the request gets there, given the recorded tokens before; `[n]` if the text fills
            `max_len`.
        logprobs: float32, log-probabilities of the targets, raw or processed as the request asks.
        given_logprobs: float32 `[n]`, log-probabilities of the recorded tokens.
        likeliest: findings about the whole text, see `Likeliest`; None if the request does not ask for it.
        thoughts: token ids of the thought after each chunk of a prompt that is read with thoughts.
    """

    targets: np.ndarray
    logprobs: np.ndarray
    given_logprobs: np.ndarray
    likeliest: Likeliest | None = None
    thoughts: list[list[int]] = dataclasses.field(default_factory=list)

    def of_given(self, token_ids: Sequence[int]) -> "Replay":
        """This replay about `n` tokens that a request gives, instead of what it would generate."""
        return dataclasses.replace(self, targets=np.asarray(token_ids, np.int32), logprobs=self.given_logprobs)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        id: name of the request.
        index: number of the sample, 0 .. n-1.
        prompt_token_ids: the prompt.
        token_ids: new tokens, a stop token included; or those that were given.
        logprobs: float32 log-probability of each new token; from the canonical pass if the request was deterministic.
        text: the new tokens as text that goes on after the prompt, special tokens left out; "" without a tokenizer.
        finish_reason: "stop", "length", "abort", "error" (a logit was not finite, or see `error`), or "given" (tokens were
            scored).
        logprobs_mode: whose `logprobs` and `top_logprobs` are, see `SamplingParams`.
        top_logprobs: the `logprobs` likeliest tokens at each new position with their log-probabilities in the canonical pass,
            the likeliest first, the lower id first among equals; () if none were asked for, or on "abort".
        prompt_logprobs: raw log-probability of each prompt token, None for the first; () if they were not asked for.
        prompt_top_logprobs: the `prompt_logprobs` likeliest tokens at each position of the prompt, none at the first.
        digest: sha256 over prompt, sampling, tokens, log-probability bits, model, schedule and fingerprint.
        stats: counts of speculation.
        thoughts: thoughts after each chunk of the prompt but the last; () if it was read without thoughts, and on
            "abort".
        error: message of an error of this request alone, such as a tokenizer that cannot decode its tokens; the
            traceback is in the log under its id. There are no tokens, text and digest then. "" if nothing did.
        replay: findings if `Request.replays`; there are no tokens, text and digest then, either.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    digest: str
    stats: Stats
    index: int = 0
    logprobs_mode: str = "raw"
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    thoughts: tuple[Thought, ...] = ()
    error: str = ""
    replay: Replay | None = None


class Update(NamedTuple):
    """News of one sample of a request.

    Attributes:
        request: the sample, with its `id` and `index`.
        token_ids: tokens that were committed since the last update.
        logprobs: their log-probabilities.
        text: the text that is complete with them.
        completion: all of it, in the last update; None before.
    """

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    completion: Completion | None


def completion_digest(
    request: Request,
    token_ids: tuple[int, ...],
    logprobs: np.ndarray,
    found: Sequence[Any],
    context: str,
    brought: Mapping[str, Any] = NOTHING,
) -> str:
    """Digest of a completion within `context`, the digest of everything else its bits depend on.

    `found` is what a rider found in its prompt, `brought` are the facts of what the request brings for riders.
    """
    bits = logprobs.astype(np.float32).view(np.uint32).tolist()
    asked = list(request.prompt_token_ids), request.sampling.facts()
    facts = [context, *asked, list(token_ids), bits, list(found), *([brought] if brought else [])]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
