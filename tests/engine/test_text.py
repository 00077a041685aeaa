"""Texts that grow, and stop strings, on tokens of which every step can be seen."""

import pytest

from detspec.checkpoint.detokenizer import Detokenizer, TokenBytes
from detspec.engine.sequence import GrowingText
from tests.decoders import TOKENS, small_library

NAMES = ["<s>", *(name for name, _, _ in TOKENS["byte_fallback"])]
HALF, END = "<0xC3>", "<0xA9>"  # of "é"
LINE, EURO = "<0x0A>", ("<0xE2>", "<0x82>", "<0xAC>")


def text_of(names, stop=(), *, min_tokens=0, looks=(99,)) -> GrowingText:
    """The text of the tokens of these names, of which each look reads some."""
    text = GrowingText(Detokenizer(TokenBytes(small_library("byte_fallback"))), stop, min_tokens=min_tokens)
    ids = list(map(NAMES.index, names))
    for number in looks:
        text.read(ids[text.num_tokens : number])
    return text


@pytest.mark.parametrize(
    ("names", "stop", "min_tokens", "expected"),
    [
        (["a", "a", "▁b", "a"], [" b"], 0, (3, "aa")),
        (["a", "▁", "a", "a"], ["a a"], 0, (3, "")),  # completed by the third of its tokens
        (["a", "ab", "a"], ["b"], 0, (2, "aa")),  # the text ends inside of a token
        (["a", "a", "a"], ["b"], 0, None),
        (["a", "▁b", "a", "▁b"], ["a b"], 2, (4, "a b")),  # the first one lies within min_tokens
        (["a", "▁b", "a", "▁b"], ["ba"], 2, (3, "a ")),  # ends behind them
        (["▁the", "a", "▁b"], [" b", "ea"], 0, (2, " th")),  # the one that is complete first
        (["a", "ab"], ["b", "ab"], 0, (2, "a")),  # complete at once: the one that begins first
        ([HALF, END, "a"], ["é"], 0, (2, "")),
        ([HALF, "a"], ["é"], 0, None),
        ([HALF, "a"], ["\ufffd"], 0, (2, "")),  # "a" settles that the byte is no character
        ([HALF], ["\ufffd"], 0, None),  # it may still become one
        (["<0xFF>"], ["\ufffd"], 0, (1, "")),  # this one never
        ([LINE, *EURO], ["\n"], 0, (1, "")),  # bytes that follow do not matter
        (["a", LINE, *EURO[:2]], ["\n"], 0, (2, "a")),
        (["a", *EURO, LINE], ["€\n"], 0, (5, "a")),
    ],
)
def test_stop_string_ends_the_text_at_the_first_token_whose_settled_text_holds_it(names, stop, min_tokens, expected):
    for looks in ([99], range(1, 9), [3, 4, 99], [2, 5]):
        text = text_of(names, stop, min_tokens=min_tokens, looks=looks)
        assert ((text.num_tokens, text.text) if text.is_stopped else None) == expected
        if expected is not None:
            assert text.whole == text.text


@pytest.mark.parametrize(
    ("names", "stop", "shown", "whole"),
    [
        (["a", "ab"], [], "aab", "aab"),
        (["a", HALF], [], "a", "a\ufffd"),
        (["a", "<0xFF>"], [], "a\ufffd", "a\ufffd"),
        (["a", "ab"], ["bc"], "aa", "aab"),  # the b may be the beginning of bc
        (["a", "ab"], ["abc"], "a", "aab"),
        (["a", "ab"], ["xyz", "b!"], "aa", "aab"),
        (["a", "ab"], ["abx", "aa"], "", ""),
        (["a", "ab"], ["aba"], "a", "aab"),
        (["ab", "a"], ["abd"], "ab", "aba"),
    ],
)
def test_shown_holds_back_what_a_stop_string_may_begin_with(names, stop, shown, whole):
    text = text_of(names, stop)
    assert text.whole == whole
    assert text.shown == (shown if not text.is_stopped else text.text)
