"""Text of tokens that come one at a time: what each token adds for good, whatever follows.

A tokenizer's own decoder is for whole texts. It turns a run of bytes that ends inside a character into U+FFFD, those of whole
characters among them, and gives them back when the rest comes. Here a character is settled once its last byte is there:

    tokens      \n   <0xE2>   <0x82>   <0xAC>   z
    adds       "\n"    ""       ""      "€"    "z"      a text that ends after <0x82> ends in one U+FFFD

So the settled text of `n` tokens is a function of these tokens, and begins that of `n + 1` tokens.
"""

import codecs
import contextlib
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

PER_TOKEN = ("ByteLevel", "ByteFallback", "Metaspace", "WordPiece", "Fuse")  # the text of a token follows from it alone
PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that stand for themselves at byte level
LONGEST = 3  # bytes of a character that lacks one
CACHED = 1 << 16
Piece = tuple[bytes, str | None]  # bytes that a token adds to a text; as text, too, if it is whole characters


class TokenBytes:
    """The UTF-8 that each token of a tokenizer adds to a text.

    Bytes are read from the vocabulary, in the two alphabets that decoders have:

        byte level     Ġfib     -> b" fib"      each character stands for a byte
        byte fallback  <0xC3>   -> b"\xc3"

    Other tokens add what the decoder makes of them after another token: "▁fib" is " fib", and "fib" only in front of a text.
    """

    def __init__(self, library: "tokenizers.Tokenizer") -> None:
        """Reads the added tokens and the kind of decoder of `library`."""
        self._library = library
        added = library.get_added_tokens_decoder()
        # As the library shows them: those that are looked for in normalized texts are normalized, too.
        self.added = {token: library.id_to_token(token) or entry.content for token, entry in added.items()}
        self.special = frozenset(token for token, entry in added.items() if self._is_left_out(token, entry.special))
        parts = [] if library.decoder is None else list(_parts(json.loads(library.decoder.__getstate__())))
        types = [part["type"] for part in parts]
        self._is_byte_level = "ByteLevel" in types
        self._has_bytes = "ByteFallback" in types
        fused = types.index("Fuse") if "Fuse" in types else len(types)
        self._is_per_token = all(_is_per_token(part, place > fused) for place, part in enumerate(parts))
        self._of = functools.lru_cache(maxsize=CACHED)(self._make)

    def _is_left_out(self, token: int, is_special: bool) -> bool:
        """Whether the library leaves an added token out of texts: it remembers special ones that another file made plain."""
        try:
            with panics():
                shown = self._library.decode([token], skip_special_tokens=False)
                return is_special if not shown else self._library.decode([token]) != shown
        except Exception:  # a decoder that fails does so again when a text needs it
            return is_special

    def after(self, previous: int | None, token: int) -> Piece | None:
        """Returns what `token` adds after `previous`, or in front of a text after None; None if the vocabulary lacks it.

        Raises what the library raises if its decoder fails.
        """
        return self._of(token if previous is not None and self._is_per_token else previous, token)

    def _make(self, previous: int | None, token: int) -> Piece | None:
        piece = self.added.get(token, self._library.id_to_token(token))
        if piece is None:
            return None
        raw = self._bytes(previous, token, piece)
        try:
            return raw, raw.decode()
        except UnicodeDecodeError:
            return raw, None

    def _bytes(self, previous: int | None, token: int, piece: str) -> bytes:
        if self._is_byte_level:
            if token in self.added or not all(letter in BYTES for letter in piece):
                return piece.encode()
            return bytes(BYTES[letter] for letter in piece)
        if self._has_bytes and len(piece) == 6 and piece[:3] == "<0x" and piece[3:5] >= "80" and piece.endswith(">"):
            try:
                return bytes.fromhex(piece[3:5])
            except ValueError:
                pass  # the library takes it for a word, too
        if previous is None:
            return self._decode([token]).encode()
        before = self._decode([previous])
        both = self._decode([previous, token])
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, both, strict=False))
        return both[len(list(equal)) :].encode()

    def _decode(self, ids: list[int]) -> str:
        with panics():
            return str(self._library.decode(ids, skip_special_tokens=False))


class Detokenizer:
    """The text of tokens that come one at a time, after a prompt or from the start of a text."""

    def __init__(self, tokens: TokenBytes | None, after: Sequence[int] = ()) -> None:
        """Begins after the token ids `after`. Special tokens are left out; without `tokens` all are."""
        self._tokens = tokens
        self._previous: int | None = None  # the last token that was not left out
        self._pending = b""  # bytes of a character that is not whole yet
        last: list[int] = []
        for token in reversed(after):
            if piece := self._piece(token, token):
                last.append(token)
                if piece[1] or len(last) > LONGEST:
                    break
        self.read(reversed(last))

    @property
    def begins(self) -> bool:
        """Whether there is no token yet: the first one may add another text than it does later."""
        return self._previous is None

    @property
    def rest(self) -> str:
        """The end of the text if no token follows: U+FFFD in place of a character that lacks bytes, else nothing."""
        return "\ufffd" if self._pending else ""

    def read(self, tokens: Iterable[int]) -> str:
        """Takes in `tokens`; returns the text that is settled with them."""
        return "".join(map(self.push, tokens))

    def push(self, token: int) -> str:
        """Takes in the next token; returns the text that is settled with it."""
        piece = self._piece(self._previous, token)
        if piece is None:
            return ""
        raw, text = piece
        self._previous = token
        if text is None or self._pending:
            raw = self._pending + raw
            text, number = codecs.utf_8_decode(raw, "replace", False)
            self._pending = raw[number:]
        return text

    def _piece(self, previous: int | None, token: int) -> Piece | None:
        if self._tokens is None or token in self._tokens.special:
            return None
        return self._tokens.after(previous, token)


@contextlib.contextmanager
def panics() -> Iterator[None]:
    """Makes a `RuntimeError` of a panic inside the library, which is written in Rust; it comes as a `BaseException`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from error


def _is_per_token(part: dict[str, Any], is_fused: bool) -> bool:
    """Whether this step of a decoder makes of a token what follows from it alone, but for the first one of a text."""
    if part["type"] == "Replace":
        return not is_fused
    if part["type"] == "Strip":
        return not part["stop"]
    return part["type"] in PER_TOKEN


def _parts(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a decoder, in order."""
    if part.get("type") == "Sequence":
        for inner in part["decoders"]:
            yield from _parts(inner)
    else:
        yield part


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it is printable, else one from U+0100 on, in order."""
    others = [byte for byte in range(256) if byte not in PRINTABLE]
    return {chr(byte): byte for byte in PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_letters()
