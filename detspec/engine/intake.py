"""Prompts, texts and records as requests, checked: what an engine of a model and a config takes."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request
from detspec.environment import default_schedule
from detspec.errors import InputError, shortened, shown
from detspec.generation.checks import check_ids, check_prompt, check_type, is_traced
from detspec.plain import plain_ids
from detspec.riders.rider import NOTHING
from detspec.sampling_params import SamplingParams
from detspec.thinking.rider import thinks

ONE_TOKEN = SamplingParams(max_tokens=1)
MAX_SHOWN = 80  # characters of what is no model


def check_is_model(given: Any) -> None:
    """Raises `InputError` for anything but a model whose weights are known."""
    if not isinstance(given, Model):
        what = shortened(shown(given), MAX_SHOWN)
        raise InputError(f"an engine takes a model, as detspec.load gives it, got {what}: load it first")
    if is_traced(given.params):
        raise InputError("an engine runs programs of its own: make it outside of jax.jit, jax.grad and jax.vmap")


def request_of(
    model: Model,
    config: EngineConfig,
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    *,
    id: str = "0",
    brings: Mapping[str, Any] = NOTHING,
) -> Request:
    """Tokenizes and checks one prompt for engines of `model` and `config`; raises `InputError` as `check_request` does."""
    return check_request(model, config, Request(id, tokens_of(model, prompt), sampling, brings=brings))


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


def to_replay(records: Iterable[tuple[Request, Sequence[int]]], lookahead: int) -> Iterator[Request]:
    """Requests that replay `records`, numbered by `index`; of `lookahead` at a time, those that are alike come together.

    What needs no processing or no noise comes apart, and like prompts share pages.
    """

    def likeness(request: Request) -> tuple[bool, bool, tuple[int, ...]]:
        return request.needs_processing, request.sampling.temperature > 0, request.prompt_token_ids

    waiting = enumerate(records)
    while ahead := list(itertools.islice(waiting, lookahead)):
        requests = [
            dataclasses.replace(request, given_token_ids=tuple(token_ids), replays=True, index=number)
            for number, (request, token_ids) in ahead
        ]
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
    _check_images(model, request)
    if request.replays:
        return _check_replayed(model, config, request)
    if request.given_token_ids:
        request = _check_given(model, request)
    ids = request.prompt_token_ids
    sampling = request.sampling
    check_prompt(ids, sampling, model.cfg, max_len=config.max_len)
    if sampling.stop and model.tokenizer is None:
        raise InputError(f"{model.no_tokenizer}, so there is no text to look for stop strings in")
    asked = f"the prompt has {len(ids)} tokens and max_tokens is {sampling.max_tokens}"
    _check_pages(model, config, len(ids) + sampling.max_tokens, asked)
    return _with_thinking(model, request)


def _check_images(model: Model, request: Request) -> None:
    """Raises `InputError` for a token that stands for an image, of which the model would see its embedding alone."""
    held = model.image_ids.intersection((*request.prompt_token_ids, *request.given_token_ids)) if model.image_ids else ()
    if held:
        raise InputError(
            f"{request.id!r} holds the token {min(held)}, which stands for an image, and only the text part of this model was "
            "read: leave it out"
        )


def _check_pages(model: Model, config: EngineConfig, length: int, asked: str) -> None:
    """Raises `InputError`, which begins with what was `asked`, if `length` positions take more pages than there are."""
    if config.num_pages is None:  # there are enough for any request of `max_len`
        return
    numerics = (config.schedule or default_schedule(model.cfg)).numerics
    needed = numerics.num_pages(length)
    if needed > config.num_pages:
        raise InputError(
            f"{asked}: {needed} pages of {numerics.page}, more than num_pages ({config.num_pages}): shorten one or raise "
            "num_pages"
        )


def _check_replayed(model: Model, config: EngineConfig, request: Request) -> Request:
    """`request` if its text is one that an engine of `config` could have written; a full cache has no token after it."""
    text = (*request.prompt_token_ids, *request.given_token_ids)
    if len(text) > config.max_len:
        raise InputError(f"{request.id!r} has {len(text)} tokens with its prompt, more than the max_len of {config.max_len}")
    try:
        check_prompt(text, ONE_TOKEN, model.cfg, max_len=config.max_len + 1)
    except InputError as error:
        raise InputError(f"{request.id!r}: {error}") from error
    if request.sampling.n != 1:
        raise InputError(f"{request.id!r} asks for {request.sampling.n} samples: replay each as a request of its own")
    _check_pages(model, config, len(text), f"{request.id!r} has {len(text)} tokens with its prompt")
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
