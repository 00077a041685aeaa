"""The bytes and the text of single tokens, as log-probabilities name them.

A tokenizer's decoder is for whole texts: it drops special tokens and a leading blank, and turns bytes that are no whole
character into U+FFFD. So tokens are read from the vocabulary, in the two alphabets that decoders have.

    byte level     Ġfib    -> b" fib"      each character stands for a byte
    byte fallback  ▁fib    -> b" fib"      a bar is a blank, <0xC3> is a byte
"""

import functools
import json
from collections.abc import Mapping

from detspec.checkpoint.tokenizer import Tokenizer

BLANK = "▁"
PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that stand for themselves at byte level


class TokenTexts:
    """Bytes and texts of the tokens of one tokenizer; of none, a token's text is its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Reads the added tokens and the kind of decoder of `tokenizer`."""
        self._library = None if tokenizer is None else tokenizer.library
        self._added: Mapping[int, str] = {}
        self._is_byte_level = False
        if self._library is not None:
            self._added = {id: token.content for id, token in self._library.get_added_tokens_decoder().items()}
            decoder = self._library.decoder
            self._is_byte_level = decoder is not None and "ByteLevel" in _types(json.loads(decoder.__getstate__()))
        keep = functools.lru_cache(maxsize=1 << 16)
        self.bytes_of = keep(self._bytes_of)
        self.text_of = keep(self._text_of)
        self.length_of = keep(self._length_of)

    def _text_of(self, token: int) -> str:
        r"""Its text; of bytes that are no whole characters `bytes:\xe2\x80`, so that no two such tokens look the same."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _length_of(self, token: int) -> int | None:
        """Characters of its text; None of bytes that are no whole characters."""
        try:
            return len(self.bytes_of(token).decode())
        except UnicodeDecodeError:
            return None

    def _bytes_of(self, token: int) -> bytes:
        """The UTF-8 that it adds to a text."""
        if token in self._added:
            return self._added[token].encode()
        piece = None if self._library is None else self._library.id_to_token(token)
        if piece is None:  # a row of the embedding without a token
            return f"<{token}>".encode()
        if self._is_byte_level:
            return bytes(BYTES[letter] for letter in piece) if all(letter in BYTES for letter in piece) else piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(BLANK, " ").encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it is printable, else one from U+0100 on, in order."""
    others = [byte for byte in range(256) if byte not in PRINTABLE]
    return {chr(byte): byte for byte in PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _types(part: object) -> set[str]:
    """The types of a decoder and of those in it."""
    if isinstance(part, list):
        return set().union(*map(_types, part)) if part else set()
    if isinstance(part, dict):
        return ({part["type"]} if isinstance(part.get("type"), str) else set()) | _types(list(part.values()))
    return set()


BYTES = _byte_letters()
