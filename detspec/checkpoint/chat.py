"""Chat templates: conversations as the text that a model was trained on, rendered as transformers renders them.

A template comes with a checkpoint and may be hostile. It runs in a sandbox with a bounded amount of work, and sees the
conversation, the special tokens and the caller's variables, nothing else.
"""

import datetime
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols

from detspec.checkpoint.template_sandbox import MAX_SOURCE, BoundedEnvironment
from detspec.checkpoint.template_time import NO_TIME
from detspec.errors import InputError
from detspec.read_json import read_bounded, read_json_object

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT_NAME = "default"
MAX_LAYOUT = 1000  # characters of a date's format


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the model's words for training: only its contents count here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The template of one folder, compiled; `digest` is the SHA-256 of its source and the special tokens, in hex."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, path: str | Path = "chat template") -> None:
        """Compiles `source`; `path` names it in errors. Raises `InputError` if it is no jinja2 template."""
        self._path = path
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.digest = hashlib.sha256(json.dumps([source, self._special_tokens], sort_keys=True).encode()).hexdigest()
        self._lock = threading.Lock()  # one rendering at a time uses the budget
        self._environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # also of Python's compiler, which compiles what jinja2 makes of it
            raise InputError(f"{path} is no template that can be read: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime.datetime | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.
            add_generation_prompt: end with the opening of the assistant's answer.
            tools: JSON schemas of functions that the model may call.
            now: the time that templates print. The clock's if None: the text, and all that is generated from it, then change
                from day to day. `template_time.NO_TIME` gives them none: they print the date that they name themselves, if any.
            variables: what else the template reads.

        Raises:
            InputError: the template rejects the conversation, fails, or takes more work than `template_sandbox` allows.
        """
        if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
            raise InputError("a conversation must be a list of messages, each an object with role and content")
        if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
            raise InputError(f"tools must be a list of JSON schemas, got {tools!r}")
        if not messages:
            raise InputError("the conversation is empty: give at least one message")
        present = datetime.datetime.now() if now is None else now
        given: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if present != NO_TIME:
            given["strftime_now"] = lambda layout: present.strftime(layout[:MAX_LAYOUT])
        try:
            with self._lock:
                self._environment.budget.renew()
                return self._template.render({**given, **self._special_tokens, **variables})
        except Exception as error:  # a template may raise anything
            has_none = present == NO_TIME and "strftime_now" in str(error)
            hint = "; the template prints the date, and a job has none: give --created SECONDS" if has_none else ""
            raise InputError(f"{self._path} does not take this conversation: {error}{hint}") from error


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a Hugging Face folder: `chat_template.jinja`, else the key in `tokenizer_config.json`, else None.

    Raises `InputError` if one of these files cannot be read, or holds what is no template or no special token.
    """
    config = read_json_object(folder / CONFIG_FILE) or {}
    special_tokens = read_special_tokens(folder)
    raw = read_bounded(folder / TEMPLATE_FILE, 4 * MAX_SOURCE)
    if raw is not None:
        try:
            return ChatTemplate(
                raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n"), special_tokens, path=folder / TEMPLATE_FILE
            )
        except UnicodeDecodeError as error:
            raise InputError(f"{folder / TEMPLATE_FILE} is not UTF-8 (byte {error.start + 1})") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = [entry for entry in source if isinstance(entry, dict)]
        source = next((entry.get("template") for entry in named if entry.get("name") == DEFAULT_NAME), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise InputError(f"{folder / CONFIG_FILE}: chat_template must be a text or a list of named ones, got {source!r}")
    return ChatTemplate(source, special_tokens, path=f"{folder / CONFIG_FILE}: chat_template")


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens that a folder's `tokenizer_config.json` names, by names such as "bos_token".

    Raises `InputError` if the file cannot be read, or one of them is no text.
    """
    config = read_json_object(folder / CONFIG_FILE) or {}
    special_tokens = {name: text for name in SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    if wrong := [name for name, text in special_tokens.items() if not isinstance(text, str)]:
        raise InputError(f"{folder / CONFIG_FILE}: {', '.join(wrong)} must be texts, or objects with a text as content")
    return special_tokens


def _token_text(token: Any) -> Any:
    """The text of a special token, which is given as text or as an object with it."""
    return token.get("content") if isinstance(token, dict) else token


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
