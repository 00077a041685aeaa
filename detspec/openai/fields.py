"""Request bodies field by field: types, refusals by name, and fields that are not implemented.

A field that is null counts as not given. A field that changes nothing that is generated is accepted; one that would, and is not
implemented, is refused unless its value asks for nothing (`NEUTRAL`), and so is an unknown one.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from detspec.errors import InputError, ParameterError, shortened, shown
from detspec.sampling_params import FIELDS, SamplingParams

# Codes of `BodyError`, as OpenAI's errors have them.
MISSING = "missing_required_parameter"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"
INVALID = "invalid_value"
TOO_LONG = "context_length_exceeded"
MAX_NAME = 200  # characters of a field's name in an error


class BodyError(InputError):
    """A body that is refused; its text says what was given, and what is accepted.

    Attributes:
        param: the field at fault; None if it is none in particular.
        code: the kind of fault, as OpenAI's errors have it.
    """

    def __init__(self, message: str, param: str | None = None, code: str = INVALID) -> None:
        super().__init__(message)
        self.param = None if param is None else shortened(param, MAX_NAME)
        self.code = code


class SharedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that completions and chats share. A parameter of sampling that is None is not given."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: int | float | None = None
    top_p: int | float | None = None
    top_k: int | None = None
    min_p: int | float | None = None
    repetition_penalty: int | float | None = None
    frequency_penalty: int | float | None = None
    presence_penalty: int | float | None = None
    logit_bias: dict[str, Any] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    is_deterministic: bool | None = None
    thinking: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_weight_versions: bool = False
    request_id: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] = {}  # each body has its own
    # Fields that change nothing in the generated text.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None


class CompletionBody(SharedBody, frozen=True, kw_only=True):
    """The body of `/v1/completions`; `prompt` is what `prompts.prompt_list` takes."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool = False


class ChatBody(SharedBody, frozen=True, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Any] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The field `stream_options`: whether a stream ends with a chunk of usage, and whether each chunk has it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


# How errors describe the type of a field.
SENTENCES: dict[Any, str] = {
    int: "an integer",
    int | float: "a number",
    bool: "true or false",
    bool | str: "true, false or the name of a message's field",
    str: "a string",
    str | list[str]: "a string or a list of strings",
    list[int]: "a list of integers",
    list[Any]: "a list",
    dict[str, Any]: "an object",
}
# Fields that are sampling parameters of another name.
RENAMED = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs", "is_deterministic": "deterministic"}
# Fields that are not implemented, by the values that ask for nothing. A client may send every field that its own library has,
# most of them at their defaults. Null asks for nothing, too; some fields have no other such value.
ACCEPTED: tuple[tuple[tuple[Any, ...], tuple[str, ...]], ...] = (
    ((1,), ("best_of", "length_penalty", "typical_p")),
    ((0,), ("priority",)),
    ((True,), ("detokenize", "include_reasoning", "skip_special_tokens", "spaces_between_special_tokens", "stream_reasoning")),
    ((False,), ("early_stopping", "echo", "flat_logprobs", "include_stop_str_in_output", "no_stop_trim")),  # echo of a chat
    ((False,), ("return_hidden_states", "stream_options.include_obfuscation", "use_beam_search", "watermark")),
    ((True, False), ("parallel_tool_calls", "separate_reasoning")),  # a text is never parted
    (("",), ("suffix",)),
    (("medium",), ("verbosity",)),
    (("none", "auto"), ("function_call", "tool_choice")),  # without functions there is none to call
    (([],), ("allowed_token_ids", "bad_words", "documents", "functions", "logits_processors", "stop_regex", "tools")),
    ((["text"],), ("modalities",)),
    (({},), ("media_io_kwargs", "mm_processor_kwargs", "vllm_xargs")),
    (({"type": "text"},), ("response_format",)),
    ((), ("adapter_id", "audio", "cache_salt", "chat_template", "custom_logit_processor", "custom_params", "ebnf", "grammar")),
    ((), ("guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex")),
    ((), ("guided_whitespace_pattern", "json_schema", "kv_transfer_params", "lora_path", "moderation", "prediction")),
    ((), ("prompt_embeds", "reasoning_effort", "regex", "session_params", "structural_tag", "structured_outputs")),
    ((), ("thinking_token_budget", "tool_prompt", "truncate", "truncate_prompt_tokens", "web_search_options")),
)
NEUTRAL = {name: values for values, names in ACCEPTED for name in names}

Fields = TypeVar("Fields", bound=msgspec.Struct)


def read_fields(given: Any, kind: type[Fields], where: str = "") -> Fields:
    """Reads the JSON value `given`, a body or the object in its field `where`, as a `kind`.

    Raises `BodyError` naming a field that is unknown, is not implemented, or has another type.
    """
    if not isinstance(given, dict):
        raise BodyError(f"the body must be a JSON object, got {type(given).__name__}")
    prefix = where and f"{where}."
    known = kind.__struct_fields__
    fields = {name: value for name, value in given.items() if value is not None}
    for name in [name for name in fields if name not in known]:
        if prefix + name not in NEUTRAL:
            raise BodyError(f"unknown field {prefix + name!r}; accepted: {', '.join(sorted(known))}", where or name, UNKNOWN)
        value = fields.pop(name)
        if name != "best_of" or not asks_for_nothing(value, (fields.get("n"),)):  # the best 2 of 2 are both
            check_neutral(prefix + name, value)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        (name,) = re.findall(r"\$\.(\w+)", str(error))
        hint = typing.get_type_hints(kind)[name]
        accepted = next(sentence for type, sentence in SENTENCES.items() if hint in (type, type | None))
        raise BodyError(f"{prefix}{name} must be {accepted}, got {shown(fields[name])}", prefix + name) from error


def check_neutral(name: str, value: Any) -> None:
    """Raises `BodyError` unless the field `name`, which is not implemented, has a `value` that asks for nothing."""
    if not asks_for_nothing(value, NEUTRAL[name]):
        accepts = " or ".join(["omit it", *(f"give {json.dumps(one)}" for one in NEUTRAL[name])])
        raise BodyError(f"{name} is not supported, got {shown(value)}: {accepts}", name, UNSUPPORTED)


def asks_for_nothing(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether `value` is one of `neutral`: 1.0 is 1, but true is not."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def stream_options(body: SharedBody) -> StreamOptions:
    """Reads the options of a stream; `BodyError` for anything else, and for options of an answer that is no stream."""
    options = read_fields(body.stream_options, StreamOptions, "stream_options")
    if options != StreamOptions() and not body.stream:
        raise BodyError("stream_options need stream: true", "stream_options")
    return options


def sampling_of(given: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Returns `defaults` with the fields `given` over them that are sampling parameters, unless None.

    Raises `BodyError` naming the field that is out of range.
    """
    names = {RENAMED.get(name, name): name for name, value in given.items() if value is not None}
    try:
        return dataclasses.replace(defaults, **{name: given[names[name]] for name in FIELDS if name in names})
    except ParameterError as error:
        name = names[error.name]
        raise BodyError(str(error).replace(f"parameter {error.name} ", f"parameter {name} ", 1), name) from error
