"""The tokenizer of a Hugging Face folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from detspec.errors import InputError


class Tokenizer:
    """Text to token ids and back, as the folder's `tokenizer.json` says, its own beginning-of-text token included."""

    def __init__(self, path: str | Path) -> None:
        """Reads a `tokenizer.json`; `InputError` if it is missing or damaged."""
        if not Path(path).is_file():
            raise InputError(f"{path}: no such tokenizer file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{path} is no tokenizer that can be read: {error}") from error

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


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text, from `generation_config.json`, else from `config.json`; empty if neither names any."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise InputError(f"{path} holds no JSON object: {error}") from error
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and token >= 0 for token in ids):
                raise InputError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
            return tuple(ids)
    return ()
