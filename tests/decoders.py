"""Small tokenizers of each kind of decoder, whose tokens say what they add to a text.

`TOKENS[kind]` lists, for each token id: its name in the vocabulary, what it adds in front of a text, and what it adds later.
Each kind has parts of characters, and bytes that are part of none, where its alphabet has them.
"""

import json
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models

from detspec.checkpoint.detokenizer import BYTES
from detspec.checkpoint.tokenizer import Tokenizer

SPECIAL = "<s>"  # token 0 of each
LETTERS = {byte: letter for letter, byte in BYTES.items()}
HALVES = [b"\n", "é".encode()[:1], "é".encode()[1:], "€".encode()[:1], "€".encode()[1:2], "€".encode()[2:], b"\xff"]
WORDS = [b"a", b" b", b" the", b"ab", "é€".encode()]


def _pieces(is_stripped: bool) -> list[tuple[str, bytes, bytes]]:
    """As SentencePiece has them: a bar for a blank, and bytes; the first blank of a text is left out if `is_stripped`."""
    words = [(word.decode().replace(" ", "▁"), word[is_stripped and word[:1] == b" " :], word) for word in WORDS]
    blank = ("▁", b"" if is_stripped else b" ", b" ")
    return [*words, blank, *((f"<0x{half.hex().upper()}>", half, half) for half in HALVES)]


def _bars() -> list[tuple[str, bytes, bytes]]:
    """No bytes; all blanks in front of a text are left out."""
    return [("▁a", b"a", b" a"), ("▁", b"", b" "), ("▁▁b", b"b", b"  b"), ("é", *(2 * ["é".encode()])), ("ab", b"ab", b"ab")]


TOKENS: dict[str, list[tuple[str, bytes, bytes]]] = {
    "byte_level": [("".join(LETTERS[byte] for byte in word), word, word) for word in [*WORDS, *HALVES, b"a" + HALVES[3]]],
    "byte_fallback": _pieces(is_stripped=False),
    "byte_fallback_strip": _pieces(is_stripped=True),
    "metaspace": _bars(),
    "word_piece": [("a", b"a", b" a"), ("##b", b"##b", b"b"), (".", b".", b"."), ("é", *(s.encode() for s in ("é", " é")))],
}
DECODERS = {
    "byte_level": decoders.ByteLevel(),
    "byte_fallback": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "byte_fallback_strip": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "metaspace": decoders.Metaspace(),
    "word_piece": decoders.WordPiece(),
}


def library_of(names: list[str], decoder) -> tokenizers.Tokenizer:
    """A tokenizer of `names` behind the special token."""
    vocabulary = {name: token for token, name in enumerate([SPECIAL, *names])}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL))
    library.add_special_tokens([AddedToken(SPECIAL, special=True)])
    if decoder is not None:
        library.decoder = decoder
    return library


@cache
def small_library(kind: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of this `kind`."""
    return library_of([name for name, _, _ in TOKENS[kind]], DECODERS[kind])


def small_tokenizer(kind: str, folder) -> Tokenizer:
    """Our tokenizer of this `kind`, by way of a file in `folder`."""
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(json.loads(small_library(kind).to_str())))
    return Tokenizer(path)


def bytes_after(kind: str, before: list[int], ids: list[int]) -> bytes:
    """Works out from the table what `ids` add to a text that holds `before`."""
    shown = [token for token in (*before, *ids) if token]
    of_ids = len([token for token in ids if token])
    added = [TOKENS[kind][token - 1][1 if place == 0 else 2] for place, token in enumerate(shown)]
    return b"".join(added[len(added) - of_ids :])
