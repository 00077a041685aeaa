"""What goes into the engine, checked, and what comes out of it."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.environment import default_schedule
from detspec.errors import InputError, shown
from detspec.generation.checks import check_ids, check_prompt, check_type
from detspec.plain import plain_ids
from detspec.riders.counters import Stats as Stats
from detspec.riders.rider import NOTHING
from detspec.sampling_params import SamplingParams
from detspec.state import LENGTH, NOT_FINITE, STOP
from detspec.thinking.rider import thinks

FINISH_REASONS = {STOP: "stop", LENGTH: "length", NOT_FINITE: "error"}
ABORTED = "abort"
GIVEN = "given"
FAILED = FINISH_REASONS[NOT_FINITE]
TopLogprobs = tuple[tuple[int, float], ...]
# What the canonical pass says of a text, entry `p` about the token at position `p`: log-probability of the token [T], likeliest
# ids [T, k] and their log-probabilities [T, k].
Likeliest = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt as token ids, and how to continue it.

    Token ids may be in a list, a tuple, a range or an array of numpy, jax or their like; they become tuples of plain integers.

    Attributes:
        id: its name in outputs and errors.
        prompt_token_ids: the prompt, at least one token.
        sampling: how it is continued.
        index: number of the sample, once a request of several samples has been parted into them; 0 before.
        given_token_ids: what follows the prompt, to be scored; if there is any, nothing is generated.
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
    """What a model thought after one chunk of the prompt.

    Attributes:
        text: without the token that ends it; "" for nothing.
        token_ids: its tokens, the one that ends it included.
        is_cut: it did not end within `ThinkingConfig.max_thought` tokens; its last one was taken for the end.
    """

    text: str
    token_ids: tuple[int, ...]
    is_cut: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """What the canonical pass says of one recorded completion of `n` tokens, and of the token that would follow them.

    Attributes:
        targets: int32 `[n + 1]`, what the request gets there, given the recorded tokens before; `[n]` if the text fills
            `max_len`.
        logprobs: float32, log-probabilities of the targets, raw or processed as the request asks.
        given_logprobs: float32 `[n]`, log-probabilities of the recorded tokens.
        likeliest: what is found of the whole text, see `Likeliest`; None if the request does not ask for it.
        thoughts: token ids of the thought after each chunk of a prompt that is read with thoughts.
    """

    targets: np.ndarray
    logprobs: np.ndarray
    given_logprobs: np.ndarray
    likeliest: Likeliest | None = None
    thoughts: list[list[int]] = dataclasses.field(default_factory=list)

    def of_given(self, token_ids: Sequence[int]) -> "Replay":
        """The same about `n` tokens that a request gives, instead of what it would generate."""
        return dataclasses.replace(self, targets=np.asarray(token_ids, np.int32), logprobs=self.given_logprobs)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished request.

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
        stats: what speculation did.
        thoughts: what was thought after each chunk of the prompt but the last; () if it was read without thoughts, and on
            "abort".
        error: what went wrong in the engine with this request alone, such as a tokenizer that cannot decode its tokens; the
            traceback is in the log under its id. There are no tokens, text and digest then. "" if nothing did.
        replay: what was found if `Request.replays`; there are no tokens, text and digest then, either.
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
    """What is new of one sample of a request.

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


def request_of(
    model: Model, config: EngineConfig, prompt: str | Sequence[int], sampling: SamplingParams, *, id: str = "0"
) -> Request:
    """Tokenizes and checks one prompt for engines of `model` and `config`; raises `InputError` as `check_request` does."""
    return check_request(model, config, Request(id, tokens_of(model, prompt), sampling))


def to_score(
    model: Model, config: EngineConfig, number: int, text: str | Sequence[int], start: int, sampling: SamplingParams
) -> Request:
    """Tokenizes and checks one text that is to be scored from `start` on; `number` is its id.

    Raises `InputError` as `check_request` does, and if the text has no token from its start on.
    """
    ids = tokens_of(model, text)
    if type(start) is not int or not 1 <= start < len(ids):
        raise InputError(
            f"text {number} has {len(ids)} tokens and starts at {shown(start)}: accepted are starts in 1 .. {len(ids) - 1}"
        )
    return check_request(model, config, Request(str(number), ids[:start], sampling, given_token_ids=ids[start:]))


def to_replay(
    model: Model, config: EngineConfig, records: Iterable[tuple[Request, Sequence[int]]], lookahead: int
) -> Iterator[Request]:
    """Requests that replay `records`, numbered by their ids; of `lookahead` at a time, those that are alike come together.

    What needs no processing or no noise comes apart, and like prompts share pages. Raises `InputError` as `check_request` does.
    """

    def likeness(request: Request) -> tuple[bool, bool, tuple[int, ...]]:
        return request.needs_processing, request.sampling.temperature > 0, request.prompt_token_ids

    waiting = enumerate(records)
    while ahead := list(itertools.islice(waiting, lookahead)):
        requests = []
        for number, (request, token_ids) in ahead:
            given = dataclasses.replace(request, given_token_ids=tuple(token_ids), replays=True)
            requests.append(dataclasses.replace(check_request(model, config, given), id=str(number)))
        yield from sorted(requests, key=likeness)


def tokens_of(model: Model, text: str | Sequence[int]) -> tuple[int, ...]:
    """Token ids of `text`, which may be token ids; `InputError` for text without a tokenizer, and for other things."""
    if not isinstance(text, str):
        return plain_ids(text, "a prompt that is no text")
    if model.tokenizer is None:
        raise InputError(f"{model.no_tokenizer}, so prompts must be token ids, not text")
    return tuple(model.tokenizer.encode(text))


def check_request(model: Model, config: EngineConfig, request: Request) -> Request:
    """`request` as engines of `model` and `config` take it: where models think, `thinking` says whether this prompt is read so.

    Raises `InputError` if the prompt is empty, too long, needs more pages than there are, or holds ids outside the vocabulary;
    for stop tokens or biased tokens outside it; for stop strings without a tokenizer; for given tokens of a request that asks
    for several samples, the prompt's log-probabilities, or thoughts; for an id that is no text.
    """
    check_type(request.sampling)
    if not isinstance(request.id, str):
        raise InputError(f"the id of a request must be a text, got {shown(request.id)}")
    if model.tokenizer is not None:
        model.tokenizer.check_rows(request.prompt_token_ids, "the prompt")
        model.tokenizer.check_rows(request.given_token_ids, "the given text")
    if request.replays:
        return _check_replayed(model, config, request)
    if request.given_token_ids:
        request = _check_given(model, request)
    ids = request.prompt_token_ids
    sampling = request.sampling
    check_prompt(ids, sampling, model.cfg, max_len=config.max_len)
    if sampling.stop and model.tokenizer is None:
        raise InputError(f"{model.no_tokenizer}, so there is no text to look for stop strings in")
    if config.num_pages is not None:  # else there are enough for any request of `max_len`
        numerics = (config.schedule or default_schedule(model.cfg)).numerics
        needed = numerics.num_pages(len(ids) + sampling.max_tokens)
        if needed > config.num_pages:
            raise InputError(
                f"the prompt has {len(ids)} tokens and max_tokens is {sampling.max_tokens}: {needed} pages of {numerics.page}, "
                f"more than num_pages ({config.num_pages}): shorten one or raise num_pages"
            )
    return _with_thinking(model, request)


def _check_replayed(model: Model, config: EngineConfig, request: Request) -> Request:
    """`request` if its text is one that an engine of `config` could have written; a full cache has no token after it."""
    text = (*request.prompt_token_ids, *request.given_token_ids)
    if len(text) > config.max_len:
        raise InputError(f"{request.id!r} has {len(text)} tokens with its prompt, more than the max_len of {config.max_len}")
    try:
        check_prompt(text, SamplingParams(max_tokens=1), model.cfg, max_len=config.max_len + 1)
    except InputError as error:
        raise InputError(f"{request.id!r}: {error}") from error
    return _with_thinking(model, request)


def _with_thinking(model: Model, request: Request) -> Request:
    """`request` with `thinking` decided, where models think."""
    sampling = request.sampling
    if model.cfg.thinking is None or sampling.thinking is not None:
        return request
    thinking = thinks(model.cfg, sampling)
    return dataclasses.replace(request, sampling=dataclasses.replace(sampling, thinking=thinking))


def _check_given(model: Model, request: Request) -> Request:
    """`request` with as many new tokens as are given, its prompt read without thoughts."""
    sampling = request.sampling
    if sampling.n != 1 or sampling.prompt_logprobs is not None or sampling.thinking:
        raise InputError(
            "given tokens are scored once, after a prompt that is not scored itself and read without thoughts: leave out n, "
            "prompt_logprobs and thinking"
        )
    check_ids(request.given_token_ids, model.cfg, "the given text")
    thinking = None if model.cfg.thinking is None else False
    sampling = dataclasses.replace(sampling, max_tokens=len(request.given_token_ids), min_tokens=0, thinking=thinking)
    return dataclasses.replace(request, sampling=sampling)
