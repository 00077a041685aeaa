"""The tokenizer of a Hugging Face folder."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from detspec.checkpoint.added_tokens import add_named_tokens
from detspec.checkpoint.detokenizer import TokenBytes, panics
from detspec.errors import InputError, shortened
from detspec.read_json import read_bounded

MAX_FILE_BYTES = 256 << 20  # the largest have about 35 MB
MAX_GROWTH = 100  # characters that one character of a text may become, and tokens that one token may become
MAX_QUOTED = 200  # characters of a text in an error


class Tokenizer:
    """Text to token ids and back, as the folder's `tokenizer.json` says, its own beginning-of-text token included.

    Tokens that other files of the folder name are added, see `added_tokens`. `digest` is the SHA-256 of the file in hex, or one
    over it and the tokens that were added or changed; `token_bytes` says what each token adds to a text.
    """

    def __init__(self, path: str | Path, *, num_rows: int | None = None) -> None:
        """Reads a `tokenizer.json` and the files next to it; `num_rows` are those of the embedding, None for any number.

        Raises `InputError` as `read_tokenizer` and `add_named_tokens` do.
        """
        path = Path(path)
        self._tokenizer = read_tokenizer(path)
        try:
            with panics():
                added = add_named_tokens(self._tokenizer, path.parent)
                self._tokenizer.no_padding()
                self._tokenizer.no_truncation()
        except InputError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{path.parent}: tokens cannot be added to those of {path.name}: {error}") from error
        self.token_bytes = TokenBytes(self._tokenizer)
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if added:
            self.digest = hashlib.sha256(json.dumps([self.digest, added], sort_keys=True).encode()).hexdigest()
        # One more than the largest id, added tokens included.
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._beyond = range(self.vocab_size if num_rows is None else num_rows, self.vocab_size)  # ids without a row

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, for what is read of single tokens."""
        return self._tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; without `add_special_tokens` a beginning-of-text token that the tokenizer would add is left out.

        The text of a special token becomes that token, wherever it stands. Raises `InputError` if the tokenizer has no tokens
        for `text`, as one of whole words does not know every word; or has one that the embedding has no row for.
        """
        try:
            with panics():
                ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:  # the library raises bare Exception
            raise unencodable(self._tokenizer, text, error) from error
        self.check_rows(ids, "the text")
        return ids

    def check_rows(self, ids: Sequence[int], what: str) -> None:
        """Raises `InputError`, which calls them `what`, if one of `ids` is a token that the embedding has no row for.

        Gemma 3 without vision has such a token, `<image_soft_token>`, and so have fine-tunes that added a token for padding.
        """
        if self._beyond and (id := next((id for id in ids if id in self._beyond), None)) is not None:
            raise InputError(
                f"{what} holds the token {self._tokenizer.id_to_token(id)!r} with id {id}, and the model has no embedding for "
                f"it: accepted are ids in 0 .. {self._beyond.start - 1}; leave the token out"
            )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids` as the library's decoder gives it, special tokens left out unless asked for.

        A decoder that falls back to bytes gives U+FFFD for each byte of a run that ends inside a character. Completions have
        the text of a `Detokenizer`, which loses no character that is whole.

        Raises `InputError` if the tokenizer's decoder fails.
        """
        try:
            with panics():
                return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"the tokenizer cannot decode {shortened(str(list(ids)), MAX_QUOTED)}: {error}") from error


def read_tokenizer(path: str | Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a `tokenizer.json` alone.

    Raises `InputError` if the file is missing, damaged or larger than 256 MiB; if its tokens are random (dropout); or if it may
    turn a short text into a huge one.
    """
    raw = read_bounded(Path(path), MAX_FILE_BYTES)
    if raw is None:
        raise InputError(f"{path}: no such tokenizer file")
    try:
        with panics():
            tokenizer = tokenizers.Tokenizer.from_buffer(raw)
            parts = [tokenizer.normalizer, tokenizer.post_processor, tokenizer.decoder]
            growth = max(_growth(json.loads(part.__getstate__())) for part in parts if part is not None) if any(parts) else 1.0
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path} is no tokenizer that can be read: {error}") from error
    if getattr(tokenizer.model, "dropout", None):
        raise InputError(f"{path}: its tokens are random, dropout is {tokenizer.model.dropout}: set it to null")
    if growth > MAX_GROWTH:
        raise InputError(f"{path}: it makes texts {growth:.3g} times as long, accepted are up to {MAX_GROWTH}")
    return tokenizer


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a text or a list of tokens may be after this normalizer, post-processor or decoder."""
    steps = [step for value in part.values() if isinstance(value, list) for step in value if isinstance(step, dict)]
    if part.get("type") == "Sequence":
        return math.prod(map(_growth, steps))
    if part.get("type") == "Replace":
        pattern = part["pattern"].get("String", "")
        return max(1.0, len(part["content"]) / len(pattern) if pattern else 1.0 + len(part["content"]))
    if part.get("type") == "Prepend":
        return 1.0 + len(part["prepend"]) / MAX_GROWTH
    if part.get("type") == "TemplateProcessing":
        return max(1.0, sum("Sequence" in step for step in part["single"]))
    return 1.0


def unencodable(tokenizer: tokenizers.Tokenizer, text: str, error: Exception) -> InputError:
    """The error to raise when the library fails to encode `text` with `error`; names the words that the vocabulary lacks."""
    try:
        with panics():
            unknown = unknown_words(tokenizer, text)
    except Exception:  # what failed to encode the text may fail to split it too
        unknown = []
    quoted = shortened(repr(text), MAX_QUOTED)
    names = shortened(", ".join(map(repr, unknown)), MAX_QUOTED)
    what = f"the tokenizer does not know {names} in {quoted}" if unknown else f"{quoted} cannot be encoded"
    return InputError(f"{what}: {error}; give a text whose words are in its tokenizer.json")


def unknown_words(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    """The words of `text`, each once, that a tokenizer of whole words lacks; empty for a tokenizer of another kind."""
    if not isinstance(tokenizer.model, models.WordLevel) or tokenizer.pre_tokenizer is None:
        return []
    for token in tokenizer.get_added_tokens_decoder().values():
        text = text.replace(token.content, " ")
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    words = dict.fromkeys(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    return [word for word in words if tokenizer.token_to_id(word) is None]
