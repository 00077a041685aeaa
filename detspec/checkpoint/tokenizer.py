"""The tokenizer of a Hugging Face folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from detspec.errors import InputError


class Tokenizer:
    """Text to token ids and back, as the folder's `tokenizer.json` says, its own beginning-of-text token included.

    Attributes:
        digest: SHA-256 of the file, in hex.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads a `tokenizer.json`; `InputError` if it is missing or damaged."""
        if not Path(path).is_file():
            raise InputError(f"{path}: no such tokenizer file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{path} is no tokenizer that can be read: {error}") from error
        self.digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; without `add_special_tokens` a beginning-of-text token that the tokenizer would add is left out.

        The text of a special token becomes that token, wherever it stands.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out; bytes that are not whole characters become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
