"""Lines of our own format: a line of input becomes a checked request, a completion becomes a line of output."""

import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from detspec.checkpoint.conversation import NO_TIME, check_variables
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.intake import request_of
from detspec.engine.request import Completion, Request, Thought
from detspec.errors import InputError
from detspec.jobs.prompts import MAX_LINE_BYTES, JobSpec
from detspec.openai.prompts import MAX_CHARS_PER_TOKEN
from detspec.read_json import parse_json
from detspec.sampling_params import SamplingParams

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
LINE_KEYS = ("id", *PROMPT_KEYS, "chat_template_kwargs", "sampling", "metadata")
SAMPLING_KEYS = tuple(field.name for field in dataclasses.fields(SamplingParams))
MAX_METADATA_BYTES = 64 << 10  # as JSON; each sample's line of output repeats it
LOGPROB_KEYS = ("top_logprobs", "prompt_logprobs", "prompt_top_logprobs")


@dataclasses.dataclass(frozen=True)
class CheckedLine:
    """A checked line of input. It holds plain data alone, so it can wait in a file.

    Attributes:
        number: place among the lines of input, from 0.
        requests: texts to generate or to score; none for a line that an error answers.
        num_outputs: lines of output that will come of it.
        facts: further values for these lines, as the format of the line has them.
    """

    number: int
    requests: tuple[Request, ...]
    num_outputs: int
    facts: Any = None


@dataclasses.dataclass(frozen=True)
class Output:
    """A line of output.

    Attributes:
        index: number among the lines of output of one line of input.
        num_tokens: new tokens in it.
        finish_reason: as of a completion; "error" for a failed request.
        line: the bytes, without newline.
    """

    index: int
    num_tokens: int
    finish_reason: str
    line: bytes


class LineFormat(Protocol):
    """A format of lines: turns lines into requests, and completions into lines of output."""

    def id_of(self, number: int, raw: bytes) -> str:
        """The id of line `number`. Raises `InputError` if it has none."""

    def asked(self, number: int, raw: bytes, note_id: Callable[[str], object] = ...) -> CheckedLine:
        """Line `number` of the input; calls `note_id` with its id if it has one.

        Raises `InputError` if the line is malformed and no error can answer it.
        """

    def outputs(self, asked: CheckedLine, completions: Sequence[Completion]) -> Sequence[Output]:
        """Lines of output that are there with the last of the `completions` of a line; without any, if it has no requests."""


def pass_over(id: str) -> None:
    """Takes no note of an id."""


class LineReader:
    """The format of our own lines: one request each, and a line of output for each of its samples."""

    def __init__(self, engine: Engine, spec: JobSpec, repeated: Mapping[int, str]) -> None:
        """`repeated` are errors for lines whose id was used before, by number."""
        self._engine = engine
        self._defaults = spec.defaults
        self._now = spec.now
        self._repeated = repeated

    def id_of(self, number: int, raw: bytes) -> str:
        """See `LineFormat`."""
        return str(parse_line(number, raw)["id"])

    def asked(self, number: int, raw: bytes, note_id: Callable[[str], object] = pass_over) -> CheckedLine:
        """See `LineFormat`; `facts` are the metadata of the line."""
        line = parse_line(number, raw)
        note_id(line["id"])
        if number in self._repeated:
            raise InputError(self._repeated[number])
        request = parse_request(line, self._engine.model, self._engine.config, self._defaults, self._now)
        return CheckedLine(number, (request,), request.sampling.n, line.get("metadata"))

    def outputs(self, asked: CheckedLine, completions: Sequence[Completion]) -> Sequence[Output]:
        """See `LineFormat`."""
        last = completions[-1]
        line = completion_line(last, asked.requests[0].sampling.n, asked.facts)
        return (Output(last.index, len(last.token_ids), last.finish_reason, line),)


def parse_request(
    line: dict[str, Any], model: Model, config: EngineConfig, defaults: SamplingParams, now: datetime.datetime = NO_TIME
) -> Request:
    """Turns a line that `parse_line` took into a request, checked for engines of `model` and `config`.

    `now` is the time that chat templates print. Raises `InputError`, which says what is wrong.
    """
    id = line["id"]
    refuse_unknown(line, LINE_KEYS, "key")
    line = {key: value for key, value in line.items() if value is not None}  # null gives nothing
    given = [key for key in PROMPT_KEYS if key in line]
    if len(given) != 1:
        raise InputError(f'needs one of "prompt", "prompt_token_ids" and "messages", one that is not null (id {id!r})')
    if "prompt" in line and not isinstance(line["prompt"], str):
        raise InputError(f'"prompt" must be a string, got {line["prompt"]!r}; token ids go into "prompt_token_ids"')
    if len(line.get("prompt", "")) > MAX_CHARS_PER_TOKEN * config.max_len:
        raise InputError(
            f'"prompt" has {len(line["prompt"])} characters, more than {MAX_CHARS_PER_TOKEN} for each token that max_len '
            f"({config.max_len}) has room for (id {id!r}): shorten it or raise max_len"
        )
    if "prompt_token_ids" in line and not isinstance(line["prompt_token_ids"], list):
        raise InputError(f'"prompt_token_ids" must be a list of token ids, got {line["prompt_token_ids"]!r}')
    try:
        check_metadata(line.get("metadata"))
        prompt = read_chat(line, model, now) if "messages" in line else line[given[0]]
        return request_of(model, config, prompt, merge_sampling(line.get("sampling", {}), defaults), id=id)
    except InputError as error:
        raise InputError(f"{error} (id {id!r})") from error


def parse_line(number: int, raw: bytes) -> dict[str, Any]:
    """Parses a line of input into a JSON object with an id; nothing else is checked.

    An integer is taken as its digits, and a line without an id has its `number`, as rows of tables have.
    """
    check_size(raw)
    line = parse_json(raw)
    if not isinstance(line, dict):
        raise InputError(f"must be a JSON object, got {type(line).__name__}")
    id = line.get("id")
    if id is None:
        id = number
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise InputError(f'"id" must be a string that is not empty, or an integer, got {id!r}')
    return {**line, "id": str(id)}


def check_metadata(value: object) -> None:
    """Raises `InputError` unless `value` is None or an object that JSON can hold, of at most `MAX_METADATA_BYTES`."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise InputError(f'"metadata" must be a JSON object, got {value!r}')
    try:
        num_bytes = len(json.dumps(value, allow_nan=False))
    except ValueError as error:
        raise InputError('"metadata" must hold finite numbers; give null, or leave the key out') from error
    if num_bytes > MAX_METADATA_BYTES:
        raise InputError(
            f'"metadata" has {num_bytes} bytes as JSON, more than the {MAX_METADATA_BYTES} that are accepted, since each line '
            "of output repeats it: give the name of a larger thing"
        )


def check_size(raw: bytes) -> None:
    """Raises `InputError` if a line is too long."""
    if len(raw) > MAX_LINE_BYTES + raw.endswith(b"\n"):
        raise InputError(f"has more than the {MAX_LINE_BYTES >> 20} MiB that are accepted")


def read_chat(line: dict[str, Any], model: Model, now: datetime.datetime) -> list[int]:
    """Token ids of the line's rendered conversation."""
    if isinstance(line["messages"], str):
        raise InputError(
            '"messages" must be a list of messages such as [{"role": "user", "content": "..."}], got a text; a column of texts '
            "holds the JSON of such a list in each row, or in none"
        )
    variables = line.get("chat_template_kwargs", {})
    if not isinstance(line["messages"], list) or not isinstance(variables, dict):
        raise InputError('"messages" must be a list of messages, and "chat_template_kwargs" a JSON object')
    try:
        check_variables(variables)
    except InputError as error:
        raise InputError(f'"chat_template_kwargs": {error}') from error
    return model.chat_prompt(line["messages"], now=now, **variables)


def merge_sampling(given: object, defaults: SamplingParams) -> SamplingParams:
    """`defaults` overridden by what the line gives; null gives nothing."""
    if not isinstance(given, dict):
        raise InputError(f'"sampling" must be a JSON object, got {given!r}')
    refuse_unknown(given, SAMPLING_KEYS, "sampling parameter")
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(given.get("stop_token_ids", []), list):
        raise InputError(f"sampling parameter stop_token_ids must be a list of token ids, got {given['stop_token_ids']!r}")
    return dataclasses.replace(defaults, **given)


def refuse_unknown(given: dict[str, object], accepted: Sequence[str], what: str) -> None:
    """Raises `InputError` that names the keys of `given` that are not `accepted`."""
    if unknown := sorted(set(given) - set(accepted)):
        raise InputError(f"unknown {what} {', '.join(map(repr, unknown))}; accepted: {', '.join(accepted)}")


def completion_line(completion: Completion, num_samples: int, metadata: dict[str, Any] | None = None) -> bytes:
    """A line of output without newline; it holds deterministic facts alone. `num_samples` is the `n` of the request.

    `metadata` is what the line of input carries; no digest covers it.
    A log-probability is written as the shortest decimal that parses to the same float64. Every float32 is a float64, so
    its bits survive.
    """
    line = {
        "id": completion.id,
        **({"index": completion.index} if num_samples > 1 else {}),
        "token_ids": completion.token_ids,
        "text": completion.text,
        "logprobs": as_json(completion.logprobs),
        "finish_reason": completion.finish_reason,
        "prompt_len": len(completion.prompt_token_ids),
        "digest": completion.digest,
    }
    thoughts = [thought_line(thought) for thought in completion.thoughts]
    line |= {"thoughts": thoughts} if thoughts else {}
    mode = {} if completion.logprobs_mode == "raw" else {"logprobs_mode": completion.logprobs_mode}
    asked = {key: as_json(getattr(completion, key)) for key in LOGPROB_KEYS if getattr(completion, key)}
    error = {"error": completion.error} if completion.error else {}
    carried = {} if metadata is None else {"metadata": metadata}
    return json.dumps({**line, **mode, **asked, **error, **carried}, allow_nan=False).encode()


def thought_line(thought: Thought) -> dict[str, Any]:
    """A thought as JSON for a line of output."""
    return {"token_ids": list(thought.token_ids), "text": thought.text, "is_cut": thought.is_cut}


def as_json(value: Any) -> Any:
    """`value` with None for non-finite numbers, which JSON lacks: excluded tokens, and texts with non-finite logits."""
    if isinstance(value, tuple):
        return [as_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def reject_line(number: int, error: str, raw: bytes) -> bytes:
    """A line of `*.rejects.jsonl`: the line's `number` in the input from 1, the error, and the line itself."""
    return json.dumps({"line": number, "error": error, "raw": raw.decode("utf-8", "backslashreplace")}).encode() + b"\n"
