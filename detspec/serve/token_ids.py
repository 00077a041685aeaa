"""Token ids in, token ids out: `/inference/v1/generate`, for trainers that do without text."""

from collections.abc import Iterator, Sequence
from typing import Any

from detspec.engine.request import Completion, Update
from detspec.openai.bodies import Parsed
from detspec.openai.fields import BOOL, INTS, OBJECT, TEXT, BodyError, given_fields
from detspec.openai.logprobs import number_of
from detspec.openai.responses import Answerer, ending, response_id, usage, weight_versions
from detspec.serve.streams import Chunks

ACCEPTED = {"model": TEXT, "token_ids": INTS, "sampling_params": OBJECT, "stream": BOOL, "request_id": TEXT}
OUR_OWN = ("prompt", "echo", "logprobs", "prompt_logprobs", "stream", "stream_options")  # fields that the body has no use for


def completion_of(body: Any) -> dict[str, Any]:
    """The body of a completion that asks for the same; `BodyError` if it is refused."""
    given = given_fields(body, ACCEPTED)
    if "token_ids" not in given:
        raise BodyError("the body needs token_ids, those of one prompt", "token_ids")
    prompt = given.pop("token_ids")
    sampling = given.pop("sampling_params", {})
    if unused := [name for name in OUR_OWN if name in sampling]:
        raise BodyError(f"sampling_params must not hold {unused[0]}", "sampling_params")
    if sampling.get("detokenize") is False:  # an answer has no text
        sampling = {name: value for name, value in sampling.items() if name != "detokenize"}
    return {**sampling, **given, "prompt": prompt}


def ids_body(parsed: Parsed, completions: Sequence[Completion], answerer: Answerer) -> dict[str, Any]:
    """The whole answer."""
    choices = [
        _choice(index, completion.token_ids, completion.logprobs) | _end(parsed, index, completion, answerer)
        for index, completion in enumerate(completions)
    ]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return {**_head(parsed, answerer), "choices": choices, "usage": usage(parsed, num_tokens)}


class IdChunks(Chunks):
    """The same piece by piece."""

    def first(self) -> Iterator[dict[str, Any]]:
        """Nothing comes before the first tokens."""
        yield from ()

    def of(self, update: Update, place: int) -> Iterator[dict[str, Any]]:
        """The chunk that holds what is new in `update`."""
        choice = _choice(update.request.index, update.token_ids, update.logprobs)
        if update.completion is not None:
            choice |= _end(self.parsed, update.request.index, update.completion, self.answerer)
        yield {**_head(self.parsed, self.answerer), "choices": [choice]}


def _head(parsed: Parsed, answerer: Answerer) -> dict[str, Any]:
    request_id = response_id(parsed) if parsed.request_id is None else parsed.request_id
    return {"request_id": request_id, "seed": parsed.sampling[0].seed, "system_fingerprint": answerer.system_fingerprint}


def _choice(index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    return {"index": index, "token_ids": list(token_ids), "logprobs": list(map(number_of, logprobs)), "finish_reason": None}


def _end(parsed: Parsed, index: int, completion: Completion, answerer: Answerer) -> dict[str, Any]:
    return {
        **ending(parsed, index, completion, answerer),
        "digest": completion.digest,
        "weight_versions": weight_versions(completion, answerer),
    }
