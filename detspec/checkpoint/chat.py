"""Chat templates: conversations as the text that a model was trained on, rendered as transformers renders them.

Templates come with checkpoints and are code of strangers: they run in jinja2's sandbox, and see the conversation, the special
tokens and what the caller passes, nothing else.
"""

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from detspec.errors import InputError

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT_NAME = "default"


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model wrote, for training; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The template of one folder, compiled.

    Attributes:
        digest: SHA-256 of its source and the special tokens, in hex.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, path: str | Path = "chat template") -> None:
        """Compiles `source`; `path` names it in errors.

        Raises:
            InputError: it is no jinja2 template.
        """
        self._path = path
        self._special_tokens = dict(special_tokens)
        self.digest = hashlib.sha256(json.dumps([source, self._special_tokens], sort_keys=True).encode()).hexdigest()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(f"{path} is no template that can be read: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
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
            now: what templates that print a date take for the present; the clock's time if None, and then the text, and
                all that is generated from it, changes from day to day.
            variables: whatever else the template reads.

        Raises:
            InputError: the template refuses the conversation, or something is wrong with either.
        """
        if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
            raise InputError("a conversation must be a list of messages, each an object with role and content")
        if not messages:
            raise InputError("the conversation is empty: give at least one message")
        present = now or datetime.datetime.now()
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=present.strftime,
                **{**self._special_tokens, **variables},
            )
        except Exception as error:  # a stranger's code may raise anything
            raise InputError(f"{self._path} does not take this conversation: {error}") from error


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a Hugging Face folder: `chat_template.jinja`, else the key in `tokenizer_config.json`, else None."""
    config = _read_config(folder / CONFIG_FILE)
    special_tokens = {name: text for name in SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    if (folder / TEMPLATE_FILE).is_file():
        source: Any = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        return ChatTemplate(source, special_tokens, path=folder / TEMPLATE_FILE)
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((entry.get("template") for entry in source if entry.get("name") == DEFAULT_NAME), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise InputError(f"{folder / CONFIG_FILE}: chat_template must be a text or a list of named ones, got {source!r}")
    return ChatTemplate(source, special_tokens, path=f"{folder / CONFIG_FILE}: chat_template")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} holds no JSON object but {type(config).__name__}")
    return config


def _token_text(token: Any) -> str | None:
    """A special token is its text, or an object with it."""
    return token.get("content") if isinstance(token, dict) else token


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
