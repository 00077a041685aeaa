"""The fields of a request body: which there are, what type each has, and which are refused by name.

A field that is null counts as not given. A field that changes nothing that is generated is accepted; one that would, and is not
implemented, is refused unless its value asks for nothing (`NEUTRAL`), and so is an unknown one.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from detspec.errors import InputError, ParameterError, shortened, shown
from detspec.openai.neutral import NEUTRAL, NEUTRAL_OPTIONS, asks_for_nothing
from detspec.sampling_params import SamplingParams

# Codes of `BodyError`, as OpenAI's errors have them.
MISSING = "missing_required_parameter"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"
INVALID = "invalid_value"
TOO_LONG = "context_length_exceeded"
MAX_NAME = 200  # characters of a field's name in an error


class BodyError(InputError):
    """A body that is refused.

    Attributes:
        message: what was given, and what is accepted.
        param: the field at fault; None if it is none in particular.
        code: the kind of fault, as OpenAI's errors have it.
    """

    def __init__(self, message: str, param: str | None = None, code: str = INVALID) -> None:
        super().__init__(message)
        self.param = None if param is None else shortened(param, MAX_NAME)
        self.code = code

    @property
    def message(self) -> str:
        """The text of the error."""
        return str(self)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What JSON values a field takes."""

    holds: Callable[[Any], bool]
    sentence: str


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def all_are(kind: type, values: Iterable[Any]) -> bool:
    """Whether each of `values` has the type `kind` itself: true is no integer."""
    return set(map(type, values)) <= {kind}


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all_are(kind, value)


INT = Kind(_is_int, "an integer")
NUMBER = Kind(_is_number, "a number")
BOOL = Kind(lambda value: type(value) is bool, "true or false")
BOOL_OR_TEXT = Kind(lambda value: type(value) in (bool, str), "true, false or the name of a message's field")
TEXT = Kind(lambda value: isinstance(value, str), "a string")
OBJECT = Kind(lambda value: isinstance(value, dict), "an object")
TEXTS = Kind(lambda value: isinstance(value, str) or _is_list_of(str)(value), "a string or a list of strings")
INTS = Kind(_is_list_of(int), "a list of integers")
LIST = Kind(lambda value: isinstance(value, list), "a list")
ANY = Kind(lambda value: True, "anything")

# Fields of a body that are sampling parameters, with the names these have; first those that the checks of others read.
SAMPLING = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "seed": "seed",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "logprobs_mode": "logprobs_mode",
    "is_deterministic": "deterministic",
    "thinking": "thinking",
}
SHARED = {
    "model": TEXT,
    "max_tokens": INT,
    "min_tokens": INT,
    "n": INT,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INT,
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "logit_bias": OBJECT,
    "seed": INT,
    "stop": TEXTS,
    "stop_token_ids": INTS,
    "ignore_eos": BOOL,
    "prompt_logprobs": INT,
    "logprobs_mode": TEXT,
    "is_deterministic": BOOL,
    "thinking": BOOL,
    "add_special_tokens": BOOL,
    "return_token_ids": BOOL,
    "return_tokens_as_token_ids": BOOL,
    "return_weight_versions": BOOL,
    "request_id": TEXT,
    "stream": BOOL,
    "stream_options": OBJECT,
    # These change nothing that is generated.
    "user": ANY,
    "metadata": ANY,
    "store": ANY,
    "service_tier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "safety_identifier": ANY,
}
COMPLETION = {**SHARED, "prompt": ANY, "logprobs": INT, "echo": BOOL}
CHAT = {
    **SHARED,
    "messages": LIST,
    "logprobs": BOOL,
    "top_logprobs": INT,
    "max_completion_tokens": INT,
    "chat_template_kwargs": OBJECT,
    "add_generation_prompt": BOOL,
    "continue_final_message": BOOL_OR_TEXT,
}

STREAM_OPTIONS = {"include_usage": BOOL, "continuous_usage_stats": BOOL}


def given_fields(body: Any, accepted: Mapping[str, Kind]) -> dict[str, Any]:
    """The fields of `body` that are not null, checked; raises `BodyError` naming one that is unknown or has another type."""
    if not isinstance(body, dict):
        raise BodyError(f"the body must be a JSON object, got {type(body).__name__}")
    given = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in given if name not in accepted]:
        if name not in NEUTRAL:
            raise BodyError(f"unknown field {name!r}; accepted: {', '.join(sorted(accepted))}", name, UNKNOWN)
        value = given.pop(name)
        if name != "best_of" or not asks_for_nothing(value, (given.get("n"),)):  # the best 2 of 2 are both
            check_neutral(name, value, NEUTRAL[name])
    for name, value in given.items():
        check_kind(name, value, accepted[name])
    return given


def check_neutral(name: str, value: Any, neutral: Sequence[Any]) -> None:
    """Raises `BodyError` unless the field `name`, which is not implemented, has a `value` that asks for nothing."""
    if asks_for_nothing(value, neutral):
        return
    accepts = " or ".join(["omit it", *(f"give {json.dumps(one)}" for one in neutral)])
    raise BodyError(f"{name} is not supported, got {value!r}: {accepts}", name, UNSUPPORTED)


def check_kind(name: str, value: Any, kind: Kind) -> None:
    """Raises `BodyError` unless the field `name` may have this `value`."""
    if not kind.holds(value):
        raise BodyError(f"{name} must be {kind.sentence}, got {shown(value)}", name)


def stream_options(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a stream ends with a chunk of usage, and whether each chunk has it; `BodyError` for anything else."""
    options = {name: value for name, value in given.get("stream_options", {}).items() if value is not None}
    for name, value in options.items():
        if name in NEUTRAL_OPTIONS:
            check_neutral(f"stream_options.{name}", value, NEUTRAL_OPTIONS[name])
        elif name not in STREAM_OPTIONS:
            raise BodyError(
                f"unknown field stream_options.{name}; accepted: {', '.join(STREAM_OPTIONS)}", "stream_options", UNKNOWN
            )
        else:
            check_kind(f"stream_options.{name}", value, STREAM_OPTIONS[name])
    if any(options.values()) and not given.get("stream"):
        raise BodyError("stream_options need stream: true", "stream_options")
    return options.get("include_usage", False), options.get("continuous_usage_stats", False)


def sampling_of(given: Mapping[str, Any], defaults: SamplingParams, names: Sequence[str] = tuple(SAMPLING)) -> SamplingParams:
    """`defaults` with the sampling fields `names` of `given` over them; `BodyError` naming the field that is out of range."""
    values: dict[str, Any] = {SAMPLING[name]: given[name] for name in names if name in given}
    try:
        return dataclasses.replace(defaults, **values)
    except ParameterError as error:
        name = next(name for name in names if name in given and SAMPLING[name] == error.name)
        raise BodyError(str(error).replace(f"parameter {SAMPLING[name]} ", f"parameter {name} ", 1), name) from error
