"""The tokenizer of a Hugging Face folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import models

from detspec.errors import InputError


class Tokenizer:
    """Text to token ids and back, as the folder's `tokenizer.json` says, its own beginning-of-text token included.

    Attributes:
        digest: SHA-256 of the file, in hex.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads a `tokenizer.json`; `InputError` if it is missing or damaged."""
        self._tokenizer = read_tokenizer(path)
        self.digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; without `add_special_tokens` a beginning-of-text token that the tokenizer would add is left out.

        The text of a special token becomes that token, wherever it stands. Raises `InputError` if the tokenizer has no tokens
        for `text`: one of whole words does not know every word.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:  # the library raises bare Exception
            raise unencodable(self._tokenizer, text, error) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out; bytes that are not whole characters become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def read_tokenizer(path: str | Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a `tokenizer.json`; `InputError` if it is missing or damaged."""
    if not Path(path).is_file():
        raise InputError(f"{path}: no such tokenizer file")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path} is no tokenizer that can be read: {error}") from error


def unencodable(tokenizer: tokenizers.Tokenizer, text: str, error: Exception) -> InputError:
    """What to raise when the library refuses to encode `text` with `error`; names the words that are not in the vocabulary."""
    unknown = unknown_words(tokenizer, text)
    what = (
        f"the tokenizer does not know {', '.join(map(repr, unknown))} in {text!r}" if unknown else f"{text!r} cannot be encoded"
    )
    return InputError(f"{what}: {error}; give a text whose words are in its tokenizer.json")


def unknown_words(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    """The words of `text`, each once, that a tokenizer of whole words lacks; none for a tokenizer of another kind."""
    if not isinstance(tokenizer.model, models.WordLevel) or tokenizer.pre_tokenizer is None:
        return []
    for token in tokenizer.get_added_tokens_decoder().values():
        text = text.replace(token.content, " ")
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    words = dict.fromkeys(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    return [word for word in words if tokenizer.token_to_id(word) is None]
