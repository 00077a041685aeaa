"""Chat templates of a folder by name, and the special tokens that they print, as transformers reads them.

Files of templates come before `tokenizer_config.json`, and `special_tokens_map.json` counts where that has no
`added_tokens_decoder`. Tokens that only a class of transformers names, as Gemma's the mask token, are not known here.
"""

from pathlib import Path
from typing import Any

from detspec.errors import InputError
from detspec.read_json import read_bounded, read_json_object

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
CONFIG_FILE = "tokenizer_config.json"
DEFAULT_NAME = "default"
MAX_SOURCE = 1 << 17  # characters of a template
MAX_TEMPLATES = 64


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


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens that a folder names, by names such as "bos_token" or "image_token".

    These are the keys that end in `_token`, and the keys of `extra_special_tokens` if that is an object.
    Raises `InputError` if a file cannot be read, or one of them is no token.
    """
    from detspec.checkpoint.added_tokens import read_named_texts  # the process that renders templates needs no tokenizers

    return read_named_texts(folder)


def _read_source(path: Path) -> str | None:
    """The text of a file, its line ends as "\\n"; None if there is no such file."""
    raw = read_bounded(path, 4 * MAX_SOURCE)
    try:
        return None if raw is None else raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start + 1})") from error
