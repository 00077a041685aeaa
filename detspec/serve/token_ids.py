"""Token ids in, token ids out: bodies of `/inference/v1/generate`, for trainers that do without text."""

from collections.abc import Sequence
from typing import Any

import msgspec

from detspec.checkpoint.load import Model
from detspec.engine.request import Completion, Update
from detspec.openai.bodies import Parsed, parse_completion
from detspec.openai.fields import BodyError, read_fields
from detspec.openai.logprobs import number_of
from detspec.openai.responses import Answerer, ending, response_id, usage, weight_versions

OUR_OWN = ("prompt", "echo", "logprobs", "prompt_logprobs", "stream", "stream_options")  # fields that the body has no use for


class IdsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a call."""

    model: str | None = None
    token_ids: list[int] | None = None
    sampling_params: dict[str, Any] = {}
    stream: bool = False
    request_id: str | None = None


def parse_ids(value: Any, model: Model, *, max_len: int) -> Parsed:
    """Checks a body as `parse_completion` does that of a completion which asks for the same."""
    return parse_completion(completion_of(value), model, max_len=max_len)


def completion_of(value: Any) -> dict[str, Any]:
    """The body of a completion that asks for the same; `BodyError` if it is refused."""
    body = read_fields(value, IdsBody)
    if body.token_ids is None:
        raise BodyError("the body needs token_ids, those of one prompt", "token_ids")
    sampling = dict(body.sampling_params)
    if unused := [name for name in OUR_OWN if name in sampling]:
        raise BodyError(f"sampling_params must not hold {unused[0]}", "sampling_params")
    if sampling.get("detokenize") is False:  # an answer has no text
        del sampling["detokenize"]
    own = {"model": body.model, "stream": body.stream, "request_id": body.request_id, "prompt": body.token_ids}
    return sampling | {name: value for name, value in own.items() if value is not None}


def ids_body(parsed: Parsed, completions: Sequence[Completion], answerer: Answerer) -> dict[str, Any]:
    """The whole answer."""
    choices = [
        _choice(index, completion.token_ids, completion.logprobs) | _end(parsed, index, completion, answerer)
        for index, completion in enumerate(completions)
    ]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return {**_head(parsed, answerer), "choices": choices, "usage": usage(parsed, num_tokens)}


def ids_chunk(parsed: Parsed, update: Update, answerer: Answerer) -> dict[str, Any]:
    """The chunk of a stream that holds what is new in `update`."""
    choice = _choice(update.request.index, update.token_ids, update.logprobs)
    if update.completion is not None:
        choice |= _end(parsed, update.request.index, update.completion, answerer)
    return {**_head(parsed, answerer), "choices": [choice]}


def _head(parsed: Parsed, answerer: Answerer) -> dict[str, Any]:
    request_id = response_id(parsed) if parsed.body.request_id is None else parsed.body.request_id
    return {"request_id": request_id, "seed": parsed.sampling[0].seed, "system_fingerprint": answerer.system_fingerprint}


def _choice(index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    return {"index": index, "token_ids": list(token_ids), "logprobs": list(map(number_of, logprobs)), "finish_reason": None}


def _end(parsed: Parsed, index: int, completion: Completion, answerer: Answerer) -> dict[str, Any]:
    return {
        **ending(parsed, index, completion, answerer),
        "digest": completion.digest,
        "weight_versions": weight_versions(completion, answerer),
    }
