"""Tokens that a folder's other files name, added to the tokenizer of its `tokenizer.json` as transformers adds them.

1. Tokens with ids: `added_tokens_decoder` of `tokenizer_config.json`. Without one, those of `added_tokens.json`.
2. Special tokens that are not among these: bos_token, eos_token ..., then other keys that end in `_token`, then
   `extra_special_tokens`. An object at such another key is a token if its `__type` is "AddedToken".
   `special_tokens_map.json`, whose objects need no type, counts where there is no `added_tokens_decoder`.

A token that is there already takes the flags that are given here. A new one gets the next free id; where its file says another
one, transformers would go on with other ids than the file's, and here it is an error.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from detspec.config import MAX_COUNT
from detspec.errors import InputError
from detspec.read_json import read_json_object

CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
DECODER_KEY = "added_tokens_decoder"
EXTRA_KEY = "extra_special_tokens"
OLD_EXTRA_KEY = "additional_special_tokens"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Token = str | AddedToken  # a text alone is that of a special token with no other flag
Files = dict[str, Any]  # the content of a file


class Special(NamedTuple):
    """The special tokens of a folder."""

    named: dict[str, Token]  # tokens of `NAMES` first
    listed: list[Token]  # without a name
    texts: set[str]  # texts that make a token of `added_tokens.json` special


def add_named_tokens(tokenizer: tokenizers.Tokenizer, folder: Path) -> list[Any]:
    """Adds to `tokenizer` what the files of `folder` name; returns each token that is new or has other flags, as JSON.

    Raises `InputError` if a file cannot be read, what it names is no token, or a token would not get the id that is named.
    """
    config, words = _read_files(folder)
    has_decoder = config.get(DECODER_KEY) is not None
    special = _special_tokens(config, words, folder)
    if tokenizer.padding is not None and "pad_token" not in {**config, **words}:
        special.named["pad_token"] = tokenizer.padding["pad_token"]
    before = _states(tokenizer)
    if has_decoder:
        source = f"{folder / CONFIG_FILE}: {DECODER_KEY}"
        given = _tokens_of_decoder(config[DECODER_KEY], source)
        numbered = given
    else:
        source = str(folder / ADDED_FILE)
        given = _tokens_of_added_file(folder / ADDED_FILE, special.texts)
        numbered = {**given, **{id: AddedToken(**state) for id, state in before.items()}}
    tokenizer.add_tokens(_in_order(numbered, special, {state["content"] for state in before.values()}))
    for id, token in given.items():
        if token.content and (found := tokenizer.token_to_id(token.content)) != id:
            raise InputError(
                f"{source} gives the token {token.content!r} the id {id}, with those of tokenizer.json it would have "
                f"{'none' if found is None else found}: "
                "mend the file, or save the tokenizer anew with the program that made it"
            )
    changed = {id: state for id, state in sorted(_states(tokenizer).items()) if before.get(id) != state}
    for id, state in changed.items():  # the library counts tokens to find a free id, so one may be taken where there are gaps
        if id not in before and (other := tokenizer.model.id_to_token(id)) not in (None, state["content"]):
            raise InputError(f"{folder}: the token {state['content']!r} would get the id {id} of {other!r} in tokenizer.json")
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    return [*changed.items(), *(["split_special_tokens"] if tokenizer.encode_special_tokens else [])]


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens that a folder names, by names such as "bos_token" or "image_token".

    These are the keys that end in `_token`, and the keys of `extra_special_tokens` if that is an object. Tokens that only a
    class of transformers names, as Gemma's the mask token, are not known here.
    Raises `InputError` if a file cannot be read, or one of them is no token.
    """
    return {name: _text(token) for name, token in _special_tokens(*_read_files(folder), folder).named.items()}


def _read_files(folder: Path) -> tuple[Files, Files]:
    """Reads `tokenizer_config.json`, and `special_tokens_map.json` as far as it counts."""
    config = read_json_object(folder / CONFIG_FILE) or {}
    return config, {} if config.get(DECODER_KEY) is not None else read_json_object(folder / MAP_FILE) or {}


def _in_order(numbered: dict[int, AddedToken], special: Special, known: set[str]) -> list[AddedToken]:
    """Tokens with ids, in their order, then the special ones that are not among them or `known`; named ones become special."""
    tokens: list[Token] = [numbered[id] for id in sorted(numbered)]
    known = known | set(map(_text, tokens))
    order = {**dict.fromkeys(NAMES), **special.named}
    for token in (*order.values(), *special.listed):
        if token is not None and _text(token) not in known and token not in tokens:
            tokens.append(token)
    names = {_text(token) for token in special.named.values()}
    added = [AddedToken(token, special=True) if isinstance(token, str) else token for token in tokens]
    for token in added:
        token.special = token.special or token.content in names
    return added


def _special_tokens(config: Files, words: Files, folder: Path) -> Special:
    """Special tokens of `tokenizer_config.json` and of `words`, what `special_tokens_map.json` holds.

    In which order they come, which file wins and which texts make a token special are those of transformers 5.
    """
    typed = {key: value for key, value in config.items() if key in NAMES or isinstance(value, str) or _is_marked(value)}
    given = {key: _token(value, folder / CONFIG_FILE, key) for key, value in typed.items() if _is_token(key, value)}
    mapped = {key: _token(value, folder / MAP_FILE, key, special=True) for key, value in words.items() if _is_token(key, value)}
    last = {key: token for key, token in given.items() if key not in NAMES and isinstance(token, str)}
    both = {**{key: token for key, token in given.items() if key not in last}, **mapped}
    both = {key: token for key, token in both.items() if key in mapped or key not in words}  # null there is no token
    first = {key: both[key] for key in NAMES if key in both}
    extra_named, extra = _extra_tokens(config.get(EXTRA_KEY) or config.get(OLD_EXTRA_KEY), folder / CONFIG_FILE, None)
    more_named, more = _extra_tokens(words.get(EXTRA_KEY), folder / MAP_FILE, True)
    lists = [of[key] for key, of in ((EXTRA_KEY, config), (OLD_EXTRA_KEY, config), (EXTRA_KEY, words)) if key in of]
    has_list = any(not isinstance(value, dict) for value in lists)
    _, old = ({}, []) if has_list else _extra_tokens(words.get(OLD_EXTRA_KEY), folder / MAP_FILE, True)
    plain = [token for key, token in first.items() if isinstance(token, str) or key in mapped]
    texts = set(map(_text, [*plain, *(token for token in extra if isinstance(token, str)), *more]))
    return Special({**first, **both, **last, **extra_named, **more_named}, [*extra, *more, *old], texts)


def _is_token(key: str, value: Any) -> bool:
    """Whether a key of a file names a special token; other values of keys that are not standard are no tokens."""
    return value is not None if key in NAMES else key.endswith("_token") and isinstance(value, str | dict)


def _is_marked(value: Any) -> bool:
    """Whether an object of `tokenizer_config.json` says that it is a token."""
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _extra_tokens(value: Any, path: Path, special: bool | None) -> tuple[dict[str, Token], list[Token]]:
    """Tokens by their names, and without names, of a list or an object of extra tokens."""
    if not value:
        return {}, []
    if isinstance(value, dict):
        return {key: _token(token, path, key, special=special) for key, token in value.items()}, []
    if isinstance(value, list):
        return {}, [_token(token, path, EXTRA_KEY, special=special) for token in value]
    raise InputError(f"{path}: {EXTRA_KEY} must be a list or an object of tokens, got {json.dumps(value)}")


def _tokens_of_decoder(decoder: Any, source: str) -> dict[int, AddedToken]:
    """Tokens of `added_tokens_decoder` by their ids."""
    if not isinstance(decoder, dict) or not all(isinstance(value, dict) for value in decoder.values()):
        raise InputError(f"{source} must be a JSON object of ids and tokens, got {json.dumps(decoder)}")
    tokens: dict[int, AddedToken] = {}
    for key, value in decoder.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 11 and int(key) <= MAX_COUNT):
            raise InputError(f"{source} has the id {key!r}; accepted are whole numbers in 0 .. {MAX_COUNT}")
        if int(key) in tokens:
            raise InputError(f"{source} names the id {int(key)} twice, as {key!r} and with other zeros: keep one of them")
        tokens[int(key)] = _added(value, source, key, may_be_empty=True)
    return tokens


def _tokens_of_added_file(path: Path, special: set[str]) -> dict[int, AddedToken]:
    """Tokens of `added_tokens.json`, which has texts and ids alone, by their ids; `special` are texts of special tokens."""
    tokens: dict[int, AddedToken] = {}
    for text, id in (read_json_object(path) or {}).items():
        if type(id) is not int or not 0 <= id <= MAX_COUNT:
            raise InputError(f"{path}: {text!r} must have an id in 0 .. {MAX_COUNT}, got {json.dumps(id)}")
        if id in tokens:
            raise InputError(f"{path} gives the id {id} to both {tokens[id].content!r} and {text!r}: keep one of them")
        tokens[id] = AddedToken(text, normalized=text not in special, special=text in special)
    return tokens


def _token(value: Any, path: Path, key: str, *, special: bool | None = None) -> Token:
    """A token that is given as a text, or as an object of a text and flags; `special` replaces that flag of an object."""
    if isinstance(value, str):
        return value
    may_be_empty = special is not None or _is_marked(value)
    value = {**value, "special": special} if special is not None and isinstance(value, dict) else value
    return _added(value, str(path), key, may_be_empty=may_be_empty)


def _added(value: Any, source: str, key: str, *, may_be_empty: bool) -> AddedToken:
    """A token of a text and flags; if it `may_be_empty`, no text is the empty one, which the library does not add."""
    if may_be_empty and isinstance(value, dict) and value.get("content") is None:
        value = {**value, "content": ""}
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(f"{source}: {key} must be a text, or an object with a text as content, got {json.dumps(value)}")
    flags = {flag: value[flag] for flag in FLAGS if flag in value}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise InputError(f"{source}: {key}: {', '.join(FLAGS)} must be true or false, got {json.dumps(flags)}")
    return AddedToken(value["content"], **flags)


def _text(token: Token) -> str:
    return token if isinstance(token, str) else token.content


def _states(tokenizer: tokenizers.Tokenizer) -> dict[int, dict[str, Any]]:
    """Text and flags of each added token, by id."""
    return {id: token.__getstate__() for id, token in tokenizer.get_added_tokens_decoder().items()}
