"""Stop strings, on a decoder of which every step can be seen: token 1 is "a", 2 "b", 3 "ab", 4 half a character, 5 its end."""

import pytest

from detspec.engine.text import find_stop, showable

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
