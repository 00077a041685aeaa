"""Chat templates: conversations as the text that a model was trained on, rendered as transformers renders them.

A template comes with a checkpoint and may be hostile. It runs in a sandbox with a bounded amount of work, and sees the
conversation, the special tokens and the caller's variables, nothing else.
"""

import contextlib
import datetime
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols

from detspec.checkpoint.added_tokens import CONFIG_FILE
from detspec.checkpoint.conversation import (
    NO_TIME,
    Message,
    as_plain,
    check_parts,
    check_variables,
    cut_open,
    hidden_parts,
    one_part,
    one_text,
    open_last,
    plain_messages,
    probe_parts,
    unused_word,
    with_lists,
)
from detspec.checkpoint.folder import TEMPLATE_FOLDER
from detspec.checkpoint.template_limits import MAX_SOURCE
from detspec.checkpoint.template_sandbox import BoundedEnvironment
from detspec.errors import InputError
from detspec.read_json import read_bounded, read_json_object

TEMPLATE_FILE = "chat_template.jinja"
DEFAULT_NAME = "default"
TOOLS_NAME = "tool_use"  # name of the template for conversations with tools
MAX_TEMPLATES = 64
MAX_LAYOUT = 1000  # characters of a date's format
# Variables that templates always see.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the model's words for training: only its contents count here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """The templates of one folder, compiled.

    Attributes:
        sources: each template's by its name; conversations take "default", or "tool_use" if there are tools.
        digest: SHA-256 of the sources and the special tokens, in hex.
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str], *, path: str | Path = "chat template"
    ) -> None:
        """Compiles `source`, one template or several by name; `path` names it in errors.

        Raises `InputError` if one is no jinja2 template, or a special token has a name that conversations need.
        """
        self._path = path
        self.sources = {DEFAULT_NAME: source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens)
        if taken := sorted(self._special_tokens.keys() & set(GIVEN)):
            raise InputError(f"{path}: a special token must not be called {taken[0]!r}, which is what conversations consist of")
        alone = self.sources.keys() == {DEFAULT_NAME}
        facts = [self.source if alone else self.sources, self._special_tokens]
        self.digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self._lock = threading.Lock()  # one rendering at a time uses the allowance
        self._environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._environment.globals["raise_exception"] = _raise_exception
        self._compiled = {name: self._compile(name) for name in self.sources}

    @property
    def source(self) -> str | None:
        """The source of the default template; None if all have other names."""
        return self.sources.get(DEFAULT_NAME)

    def render(
        self,
        messages: Sequence[Any],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        now: datetime.datetime | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, byte for byte that of transformers 5.24.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first. A field that is None counts as left out.
            add_generation_prompt: end with the opening of the assistant's answer; None does so unless the last message goes on.
            continue_final_message: end within the last message, the assistant's, so that an answer goes on from it. A name, as
                "reasoning_content", says which field of the message; True is "content".
            tools: JSON schemas of functions that the model may call. If the folder has a template "tool_use", it is taken then.
            chat_template: the name of another one of the folder's templates.
            now: the time that templates print. The clock's if None: the text, and all that is generated from it, then change
                from day to day. `conversation.NO_TIME` gives them none: they print the date that they name themselves, if any.
            variables: further values that the template reads, such as `documents` or `enable_thinking`.

        Raises:
            InputError: the options exclude each other; the template rejects the conversation, fails, changes the message that
                goes on, or takes more work than `template_sandbox` allows.
        """
        field = _continued(continue_final_message)
        opens = _opens(add_generation_prompt, field)
        check_variables(variables)
        if tools is not None and not _are_objects(tools):
            raise InputError(f"tools must be a list of JSON schemas, got {tools!r}")
        if (documents := variables.get("documents")) is not None and not _are_objects(documents):
            raise InputError(f"documents must be a list of objects, got {documents!r}")
        name = self._name(chat_template, tools)
        present = datetime.datetime.now() if now is None else now
        try:
            plain = plain_messages(messages)
            end = ""
            if field is not None:
                plain, end = open_last(plain, field, self.sources[name])
            given: dict[str, Any] = {"messages": plain, "documents": None, "add_generation_prompt": opens}
            given["tools"] = None if tools is None else as_plain(list(tools))
            if present != NO_TIME:
                given["strftime_now"] = lambda layout: present.strftime(layout[:MAX_LAYOUT])
            with self._lock:
                self._environment.allowance.renew()
                text = self._compiled[name].render({**self._special_tokens, **given, **as_plain(variables)})
        except InputError:
            raise
        except Exception as error:  # a template may raise anything
            has_none = present == NO_TIME and "strftime_now" in str(error)
            hint = "; the template prints the date, and a job has none: give --created SECONDS" if has_none else ""
            raise InputError(f"{self._path} does not take this conversation: {error}{hint}") from error
        return text if field is None else cut_open(text, end)

    def render_parts(self, messages: Sequence[Any], /, **variables: Any) -> str:
        """`render` for contents that may be lists of parts, `{"type": "text", "text": ...}`.

        A list reaches the template if it prints the texts in it and no more. Another template gets their texts joined by line
        ends, as from vLLM: in a single part if it prints that one, else as one text. Which of the three is tried out with words
        in place of the texts, so it depends on the template and on where parts are, and not on what they say. Raises
        `InputError` for pictures, sounds and files, too.
        """
        plain = plain_messages(messages)
        check_parts(plain)
        for form in (one_part, one_text):
            hidden = self._hidden_parts(plain, variables)
            if not hidden:
                break
            plain = with_lists(plain, hidden, form)
        return self.render(plain, **variables)

    def _hidden_parts(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> set[int]:
        """Indices of messages whose lists of texts the template does not print as texts; all of them if it fails."""
        probe = probe_parts(messages, unused_word(f"{self.sources}{messages}{variables}"))
        rendered = ""
        if probe != messages:
            with contextlib.suppress(InputError):  # a template that takes no lists raises it; other errors come again
                rendered = self.render(probe, **{**variables, "continue_final_message": False})
        return hidden_parts(rendered, probe)

    def _compile(self, name: str) -> jinja2.Template:
        try:
            return self._environment.from_string(self.sources[name])
        except Exception as error:  # also of Python's compiler, which compiles what jinja2 makes of it
            of_name = "" if name == DEFAULT_NAME else f": the one called {name!r}"
            raise InputError(f"{self._path}{of_name} is no template that can be read: {error}") from error

    def _name(self, asked: str | None, tools: Any) -> str:
        """Name of the template that a conversation takes."""
        name = TOOLS_NAME if tools is not None and TOOLS_NAME in self.sources else DEFAULT_NAME
        name = name if asked is None else asked
        if not isinstance(name, str) or name not in self.sources:
            names = ", ".join(map(repr, sorted(self.sources)))
            given = "and there is no default one" if asked is None else f"got {asked!r}; other templates are not taken"
            raise InputError(f"chat_template must be one of the folder's, {names}: {given}")
        return name


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The templates of a Hugging Face folder, see `read_templates`; None if it has none.

    Raises `InputError` if one of its files cannot be read, or holds what is no template or no special token.
    """
    from detspec.checkpoint.added_tokens import read_special_tokens  # whoever only renders templates needs no tokenizers

    sources, path = read_templates(folder)
    return ChatTemplate(sources, read_special_tokens(folder), path=path) if sources else None


def read_templates(folder: Path) -> tuple[dict[str, str], str]:
    """Sources of a folder's chat templates by name, none if it has none; and where they stand.

    A single one is called "default". If there are files of templates, the config's are not looked at.
    Raises `InputError` if a file cannot be read, or holds what is no template.
    """
    paths = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    if len(paths) > MAX_TEMPLATES:
        raise InputError(f"{folder / TEMPLATE_FOLDER} holds {len(paths)} templates, accepted are up to {MAX_TEMPLATES}")
    named = {DEFAULT_NAME: folder / TEMPLATE_FILE} | {path.name.removesuffix(".jinja"): path for path in paths}
    sources = {name: source for name, path in named.items() if (source := _read_source(path)) is not None}
    if sources:
        return sources, str(named[DEFAULT_NAME] if DEFAULT_NAME in sources else folder / TEMPLATE_FOLDER)
    config = read_json_object(folder / CONFIG_FILE) or {}
    given = config.get("chat_template")
    where = f"{folder / CONFIG_FILE}: chat_template"
    pairs: Any = given
    if given is None:
        pairs = []
    elif isinstance(given, str):
        pairs = [(DEFAULT_NAME, given)]
    elif isinstance(given, dict):
        pairs = list(given.items())
    elif isinstance(given, list):
        pairs = [(entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None) for entry in given]
    if not isinstance(pairs, list) or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise InputError(f"{where} must be a text, or a list of objects with name and template, got {given!r}")
    return dict(pairs), where


def _continued(asked: Any) -> str | None:
    """Name of the last message's field that goes on; None if none does."""
    if not isinstance(asked, bool | str | None):
        raise InputError(f"continue_final_message must be true, false or the name of a field, got {asked!r}")
    return "content" if asked is True else asked or None


def _opens(asked: Any, field: str | None) -> bool:
    """Whether the text ends with the opening of an answer."""
    if not isinstance(asked, bool | None):
        raise InputError(f"add_generation_prompt must be true or false, got {asked!r}")
    if asked and field is not None:
        raise InputError(
            "add_generation_prompt opens a new message, and continue_final_message goes on with the last one: give one of them"
        )
    return field is None if asked is None else asked


def _are_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, Mapping) for entry in value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_source(path: Path) -> str | None:
    """The text of a file, its line ends as "\\n"; None if there is no such file."""
    raw = read_bounded(path, 4 * MAX_SOURCE)
    try:
        return None if raw is None else raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start + 1})") from error
