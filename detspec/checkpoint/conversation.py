"""Conversations as chat templates see them: plain values, no null fields, thoughts under every name, an open last message."""

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from detspec.errors import InputError

Message = dict[str, Any]

NO_TIME = datetime.datetime.min  # given to templates that shall see none

THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; the first that is there counts
# It stands after the last message while that is rendered. The blank at its end tells whether the template strips messages.
OPEN_END = "THE_ANSWER_GOES_ON_HERE "
UNREAD = "unread"  # a field of parts that no template reads, but that is seen where one prints a part whole
MEDIA = {"image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio", "input_file"}

# Names that callers' variables must not have: our own, and options that transformers takes under the same names.
RESERVED = (
    *("messages", "now", "add_special_tokens", "conversation", "max_length", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "truncation"),
)


def template_time(created: int | None) -> datetime.datetime:
    """The time that templates print in a job that says it is `created`, seconds since 1970; the clock's would change.

    A job that says nothing has none.
    """
    return NO_TIME if created is None else datetime.datetime.fromtimestamp(created, datetime.UTC)


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises `InputError` if a variable that a caller gives the template has the name of something else."""
    if taken := [name for name in RESERVED if name in variables]:
        raise InputError(
            f"variables of a chat template must not hold {', '.join(taken)}; accepted are its own, and tools, documents, "
            "add_generation_prompt, continue_final_message and chat_template"
        )


def plain_messages(messages: Any) -> list[Message]:
    """Copies of messages, changed as transformers changes them before it renders: null fields are left out, reasoning is named.

    Null fields are those of a message itself; what lies inside its fields stays. Messages may be objects of a client's library.
    Raises `InputError` if `messages` is no list of messages.
    """
    try:
        plain = None if isinstance(messages, Mapping) else as_plain(messages)
    except RecursionError as error:
        raise InputError("a conversation must not be nested so deeply, or hold itself") from error
    if not isinstance(plain, list | tuple) or not all(isinstance(message, dict) for message in plain):
        raise InputError("a conversation must be a list of messages, each an object with role and content")
    if not plain:
        raise InputError("the conversation is empty: give at least one message")
    return [_with_thoughts({name: value for name, value in message.items() if value is not None}) for message in plain]


def as_plain(value: Any) -> Any:
    """A copy of `value` in plain JSON types (and tuples), which have no methods that a template could misuse.

    Arrays become lists; dataclasses and pydantic models become objects. Raises `InputError` for anything else.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {as_plain(name): as_plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [as_plain(part) for part in value]
    if isinstance(value, tuple):
        return tuple(as_plain(part) for part in value)
    if isinstance(value, np.generic | np.ndarray):  # before numbers: a numpy float64 is a Python float, too
        return as_plain(value.tolist())
    if isinstance(value, str):  # an enum or another subclass, as below
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return as_plain(dump())
    raise InputError(f"a conversation and its variables are made of JSON values, got {type(value).__name__}: {value!r}")


def open_last(messages: Sequence[Message], field: str, source: str) -> tuple[list[Message], str]:
    """Messages of which the last one goes on: `OPEN_END` stands after its `field`. Also the text of that field.

    Args:
        messages: a conversation of `plain_messages`.
        field: "content", or a name of reasoning. In a list of parts the last text goes on.
        source: the template's.

    Raises:
        InputError: the last message is not the assistant's or has no such text, or the template reads no such field.
    """
    last = dict(messages[-1])
    if last.get("role") != "assistant":
        raise InputError(
            f"continue_final_message goes on with an assistant's message, but the last one has the role {last.get('role')!r}: "
            "put the beginning of the answer there, or leave the option out"
        )
    fields = [field]
    if field in THOUGHTS:  # all copies of the thought
        fields = [name for name in THOUGHTS if last.get(name) == last.get(field)]
    if not any(name in source for name in fields):
        raise InputError(f"continue_final_message is {field!r}, but the chat template reads no field of this name")
    value = last.get(field)
    text: Any = value
    if isinstance(value, list | tuple):
        indices = [index for index, part in enumerate(value) if isinstance(part, dict) and "text" in part]
        text = value[indices[-1]]["text"] if indices else None
        if isinstance(text, str):
            parts = list(value)
            parts[indices[-1]] = {**parts[indices[-1]], "text": text + OPEN_END}
            last[field] = type(value)(parts)
    elif isinstance(value, str):
        last |= dict.fromkeys(fields, value + OPEN_END)
    if not isinstance(text, str):
        raise InputError(f"continue_final_message: the last message has no text {field!r} that could go on, got {value!r}")
    return [*messages[:-1], last], text


def cut_open(rendered: str, text: str) -> str:
    """`rendered` up to the end of `text`, which `open_last` marked.

    Blanks at its end stay if the template keeps them. Raises `InputError` if the template changes the text.
    """
    index = rendered.rfind(OPEN_END.strip())
    if index < 0 or text.strip() not in rendered:
        raise InputError(
            f"continue_final_message: the chat template changes the last message, which the answer should go on from: {text!r}"
        )
    kept = rendered[:index]
    return kept if rendered[index:].startswith(OPEN_END) else kept.rstrip()


def check_parts(messages: Sequence[Message]) -> None:
    """Raises `InputError` for contents with pictures, sounds or files, and for parts of text without a text."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in MEDIA:
                raise InputError(f"messages[{index}] has a part of the type {kind!r}: models read text alone")
            if kind == "text" and not isinstance(part.get("text"), str):
                raise InputError(f'messages[{index}] has a part {part!r}; accepted are {{"type": "text", "text": ...}}')


def unused_word(text: str) -> str:
    """A word of small letters and digits that is not in `text`."""
    return next(word for number in itertools.count() if (word := f"probe{number}word") not in text.lower())


def probe_parts(messages: Sequence[Message], word: str) -> list[Message]:
    """Messages in whose lists of texts each text is a word of its own, made of `word`; so is a field that no template reads."""
    probe = list(messages)
    for index, parts in _text_lists(messages).items():
        unread = f"{word}{index}unread"
        content = [{**part, "text": f"{word}{index}text{number}end", UNREAD: unread} for number, part in enumerate(parts)]
        probe[index] = {**messages[index], "content": content}
    return probe


def hidden_parts(rendered: str, probe: Sequence[Message]) -> set[int]:
    """Indices of messages of which `rendered`, the text of `probe_parts`, leaves a text out or prints more than texts.

    An empty list counts as hidden: templates print it, or fail at its first part.
    """
    seen = rendered.lower()  # templates may change the case
    return {
        index
        for index, parts in _text_lists(probe).items()
        if not parts or any(part["text"] not in seen or part[UNREAD] in seen for part in parts)
    }


def with_lists(messages: Sequence[Message], indices: Collection[int], form: Callable[[Sequence[Any]], Any]) -> list[Message]:
    """Messages in which the lists at `indices` have another `form`: that of `one_part` or `one_text`."""
    return [
        {**message, "content": form(message["content"])} if index in indices else message
        for index, message in enumerate(messages)
    ]


def one_part(parts: Sequence[Any]) -> list[Message]:
    """The texts of `parts` in a single one."""
    return [{"type": "text", "text": one_text(parts)}]


def one_text(parts: Sequence[Any]) -> str:
    """The texts of `parts`, joined by line ends."""
    return "\n".join(part["text"] for part in parts)


def _with_thoughts(message: Message) -> Message:
    """The message with its reasoning as `reasoning_content`, which most templates read, and as `thinking`, if it has any."""
    thought = next((message[name] for name in THOUGHTS if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _text_lists(messages: Sequence[Message]) -> dict[int, Sequence[Any]]:
    """Contents that are lists of texts alone, by the indices of their messages."""
    contents = {index: message.get("content") for index, message in enumerate(messages)}
    return {
        index: content
        for index, content in contents.items()
        if isinstance(content, list | tuple) and all(_is_text(part) for part in content)
    }


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
