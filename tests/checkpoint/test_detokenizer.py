"""Text of tokens that come one at a time, next to the decoder of the library and to a table of what each token adds."""

import random

import pytest
from tokenizers import Regex, decoders

from detspec.checkpoint.detokenizer import Detokenizer, TokenBytes
from tests.decoders import DECODERS, TOKENS, bytes_after, library_of, small_library

KINDS = sorted(TOKENS)
LOOKING_BACK = {
    "bpe": library_of(["a</w>", "b", "c</w>"], decoders.BPEDecoder()),
    "words": library_of(
        ["a", ",", "'", "s"],
        decoders.Sequence(
            [decoders.WordPiece(prefix="\n", cleanup=False), decoders.Fuse(), decoders.Replace(Regex(r" (?=[,'])|(?<=') "), "")]
        ),
    ),
    "no_decoder": library_of(["a", "b"], None),
}


def texts(size: int, number: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(size) for _ in range(rng.randrange(1, 14))] for _ in range(number)]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_table_s_and_where_no_character_is_broken_the_library_s(kind):
    library = small_library(kind)
    tokens = TokenBytes(library)
    num_broken = num_equal = 0
    for ids in texts(len(TOKENS[kind]) + 1, 500):
        detokenizer = Detokenizer(tokens)
        text = detokenizer.read(ids) + detokenizer.rest
        assert text == bytes_after(kind, [], ids).decode(errors="replace")
        if "\ufffd" in text:
            num_broken += 1  # the library has one U+FFFD for each byte of a run of bytes
        else:
            num_equal += text == library.decode(ids)
    assert num_equal == 500 - num_broken > 50
    assert (num_broken > 50) == kind.startswith("byte")


@pytest.mark.parametrize("kind", [*KINDS, *LOOKING_BACK])
def test_text_after_a_prompt_goes_on_where_the_prompt_ends(kind):
    library = small_library(kind) if kind in DECODERS else LOOKING_BACK[kind]
    tokens = TokenBytes(library)
    for ids in texts(library.get_vocab_size(), 300):
        number = random.Random(len(ids)).randrange(len(ids) + 1)
        whole = Detokenizer(tokens)
        before = whole.read(ids[:number])
        after = Detokenizer(tokens, after=ids[:number])
        assert after.begins == whole.begins
        assert after.rest == whole.rest
        assert after.read(ids[number:]) == whole.read(ids[number:])
        if kind in LOOKING_BACK:
            text = Detokenizer(tokens).read(ids)
            assert text == library.decode(ids)
            assert text.startswith(before)


def test_character_is_settled_with_its_last_byte_and_none_is_lost():
    names = [name for name, _, _ in TOKENS["byte_fallback"]]
    ids = [1 + names.index(name) for name in ("<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "a")]
    detokenizer = Detokenizer(TokenBytes(small_library("byte_fallback")))
    assert [detokenizer.push(token) for token in ids] == ["\n", "", "", "€", "a"]
    cut = Detokenizer(TokenBytes(small_library("byte_fallback")))
    assert cut.read(ids[:3]) + cut.rest == "\n\ufffd"
    assert small_library("byte_fallback").decode(ids[:3]) == 3 * "\ufffd"  # loses the line's end


def test_special_tokens_and_those_that_the_vocabulary_lacks_are_left_out():
    tokens = TokenBytes(small_library("byte_level"))
    euro = [1 + [name for name, _, _ in TOKENS["byte_level"]].index(name) for name in ("â", "Ĥ", "¬")]
    between = [euro[0], 0, *euro[1:], 999]  # the vocabulary has no 999
    assert Detokenizer(tokens).read(between) == "€"
    nothing = Detokenizer(None, after=[1, 2])
    assert (nothing.read([1, 2, 3]), nothing.rest) == ("", "")
