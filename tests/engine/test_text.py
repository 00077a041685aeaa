"""Texts that grow; stop strings, on a decoder of which every step can be seen.

Token 1 is "a", 2 "b", 3 "ab", 4 half a character, 5 its end.
"""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from detspec.checkpoint.load import find_folder
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.engine.text import DecodeFn, GrowingText, find_stop, showable

LETTERS = {1: "a", 2: "b", 3: "ab", 6: "c"}


def decode(ids) -> str:
    """4 alone is no character yet; 4 5 is "é"."""
    text, ids = "", list(ids)
    while ids:
        token = ids.pop(0)
        if token == 4:
            text += "é" if ids[:1] == [5] else "\ufffd"
            ids = ids[1:] if ids[:1] == [5] else ids
        else:
            text += LETTERS[token]
    return text


@pytest.mark.parametrize(
    ("ids", "stop", "begin", "expected"),
    [
        ([1, 1, 2, 1], ["b"], 0, (3, "aa")),
        ([1, 1, 2, 1], ["ab"], 0, (3, "a")),  # completed by the second of its tokens
        ([1, 3, 6], ["b"], 0, (2, "aa")),  # the text ends inside of a token
        ([1, 1, 1], ["b"], 0, None),
        ([1, 2, 1, 2], ["ab"], 2, (4, "ab")),  # the first one lies within min_tokens
        ([1, 2, 1, 2], ["ba"], 2, (3, "a")),  # ends behind them
        ([6, 1, 2], ["b", "ca"], 0, (2, "")),  # whichever is complete first
        ([1, 2], ["b", "ab"], 0, (2, "")),  # complete at once: the one that begins first
        ([4, 5, 1], ["é"], 0, (2, "")),
        ([4, 1], ["é"], 0, None),
    ],
)
def test_find_stop_of_small_cases(ids, stop, begin, expected):
    assert find_stop(decode, ids, stop, first=1, begin=begin) == expected


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6], [3, 6], [6], [2, 5, 6]])
def test_find_stop_does_not_depend_on_when_it_looked(cuts):
    ids, known, found = [1, 6, 1, 3, 2, 6], 0, None
    for seen in cuts:
        found = find_stop(decode, ids[:seen], ["ab"], first=known + 1, begin=0)
        known = seen
        if found is not None:
            break
    assert found == (4, "aca")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abc", [], "abc"),
        ("abc\ufffd", [], "abc"),
        ("abc", ["cd"], "ab"),  # the c may be the beginning of cd
        ("abc", ["bcd"], "a"),
        ("abc", ["xyz", "c!"], "ab"),
        ("abc", ["abd"], "abc"),
    ],
)
def test_showable_holds_back_what_may_still_go(text, stop, expected):
    assert showable(text, stop) == expected


# Growing texts --------------------------------------------------------------------------------------------------------------


def pieces_tokenizer() -> tokenizers.Tokenizer:
    """As SentencePiece has them: words with their spaces, bytes, and a special token; a text's first space is left out."""
    words = ["<s>", "▁a", "▁", "b", "▁the", *(f"<0x{byte:02X}>" for byte in "é".encode())]
    library = tokenizers.Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<s>"))
    library.add_special_tokens(["<s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    return library


def decode_fns() -> dict[str, tuple[int, DecodeFn]]:
    """Sizes of vocabularies, and what decodes them."""
    shipped = Tokenizer(find_folder("tiny_python") / "tokenizer.json")
    pieces = pieces_tokenizer()
    return {
        "letters": (5, lambda ids: decode([[1, 2, 3, 4, 6][token] for token in ids])),
        "bytes": (shipped.vocab_size, shipped.decode),
        "pieces": (7, lambda ids: pieces.decode(list(ids))),
    }


@pytest.mark.parametrize("name", ["letters", "bytes", "pieces"])
@pytest.mark.parametrize("most", [1, 40])
def test_growing_text_is_that_of_all_tokens_and_decodes_few_of_them_again(name, most):
    size, decode_all = decode_fns()[name]
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, size, 400).tolist()
        ids[100:140] = [0] * 40  # special ones, which have no text
        growing, seen, num_decoded = GrowingText(begin=3), 3, 0

        def counted(some, decode_all=decode_all):
            nonlocal num_decoded  # decoding everything takes 200 at each look
            num_decoded += len(some)
            return decode_all(some)

        looks = 0
        while seen < len(ids):
            seen = min(len(ids), seen + int(rng.integers(1, most + 1)))
            assert growing.of(ids[:seen], counted) == decode_all(ids[3:seen])
            looks += 1
        assert num_decoded < (80 + most) * looks


def test_text_of_a_tokenizer_that_rewrites_what_it_wrote_is_decoded_whole():
    """This one puts the number of tokens in front."""
    growing = GrowingText()
    for number in (1, 20, 21, 60):
        assert growing.of([1] * number, lambda ids: f"{len(ids)} {decode(ids)}") == f"{number} {'a' * number}"
