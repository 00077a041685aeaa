"""Tokens one by one, as log-probabilities name them, and where they stand in a text."""

import functools

from detspec.checkpoint.detokenizer import CACHED, Detokenizer, TokenBytes
from detspec.checkpoint.tokenizer import Tokenizer


class TokenTexts:
    """Bytes and texts of the tokens of one tokenizer. Without a tokenizer a token's text is its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Names the tokens of `tokenizer`."""
        self.tokens = None if tokenizer is None else tokenizer.token_bytes
        self.bytes_of = functools.lru_cache(maxsize=CACHED)(self._bytes_of)
        self.text_of = functools.lru_cache(maxsize=CACHED)(self._text_of)

    def _text_of(self, token: int, begins: bool = False) -> str:
        r"""Its text; of bytes that are no whole characters `bytes:\xe2\x80`, so that no two such tokens look the same."""
        raw = self.bytes_of(token, begins)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes_of(self, token: int, begins: bool = False) -> bytes:
        """The UTF-8 that it adds to a text, as the first token if it `begins` one; of a special token its name."""
        if self.tokens is not None:
            if token in self.tokens.special:
                return self.tokens.added[token].encode()
            if piece := self.tokens.after(None if begins else token, token):
                return piece[0]
        return f"<{token}>".encode()  # a row of the embedding without a token


class TokenPlaces:
    """The places of tokens in a text, which come one at a time."""

    def __init__(self, tokens: TokenBytes | None, after: tuple[int, ...] = ()) -> None:
        """Places count from 0 after the prompt `after`."""
        self._detokenizer = Detokenizer(tokens, after=after)
        self._length = 0

    def next(self, token: int) -> tuple[int, bool]:
        r"""Characters that are complete before the next `token`, and whether it begins the text.

        The tokens `[" f", b"\xc3", b"\xa9", "x"]` are at 0, 2, 2 and 3.
        """
        place = self._length, self._detokenizer.begins
        self._length += len(self._detokenizer.push(token))
        return place
