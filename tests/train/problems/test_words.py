"""The tokenizer of whole words."""

import itertools
from pathlib import Path

import pytest

from detspec.checkpoint.tokenizer import Tokenizer
from detspec.errors import InputError
from detspec.train.problems.words import END, END_ID, FILLER, FILLER_ID, encode_texts, split, word_tokenizer, words_in

TEXTS = ("A coin's state is heads. Alice flips, then Bob waits. What's the state? A: tails", "a = 3; b = a + b; What's b? A: 7")
WORDS = words_in(*TEXTS)


def test_texts_are_cut_into_words_and_signs():
    assert split("The coin's state?") == ["The", "coin", "'", "s", "state", "?"]
    assert word_tokenizer(WORDS).encode("coin's state?").tokens == ["coin", "'", "s", "state", "?"]
    assert words_in("a = a;", "b = a") == ("a", "=", ";", "b")


def test_ids_are_the_end_the_filler_and_the_words_in_order():
    tokenizer = word_tokenizer(["heads", "tails"])
    assert tokenizer.get_vocab() == {END: 0, FILLER: 1, "heads": 2, "tails": 3}
    assert (END_ID, FILLER_ID) == (0, 1)
    assert tokenizer.encode(f"{FILLER}tails{END}").ids == [1, 3, 0]


def test_saved_tokenizer_is_read_as_a_checkpoints_and_gives_the_very_texts_back(tmp_path: Path):
    word_tokenizer(WORDS).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == len(WORDS) + 2
    for text in TEXTS:
        assert tokenizer.encode(text) == word_tokenizer(WORDS).encode(text).ids
        assert tokenizer.decode([FILLER_ID, *tokenizer.encode(text), END_ID]) == text


@pytest.mark.parametrize("text", TEXTS)
def test_text_only_grows_at_its_end(text: str):
    tokenizer = word_tokenizer(WORDS)
    ids = tokenizer.encode(text).ids
    shown = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    assert all(later.startswith(earlier) and later != earlier for earlier, later in itertools.pairwise(shown))


def test_unknown_words_are_refused_by_name(tmp_path: Path):
    word_tokenizer(WORDS).save(str(tmp_path / "tokenizer.json"))
    message = r"does not know 'Zed', 'sings' in '<|end|> Zed flips, Zed sings': .*UNK"
    with pytest.raises(InputError, match=message.replace("|", r"\|")):
        Tokenizer(tmp_path / "tokenizer.json").encode("<|end|> Zed flips, Zed sings")
    with pytest.raises(InputError, match="does not know 'two', 'coins' in 'two coins'"):
        encode_texts(word_tokenizer(WORDS), [TEXTS[0], "two coins"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "a"], "words given twice: a"),
        (["a", "b c", "d'", ""], "not one word each: 'b c', \"d'\", ''"),
        (["a", END], r"not one word each: '<\|end\|>'"),
    ],
)
def test_bad_words_are_refused(words: list[str], message: str):
    with pytest.raises(InputError, match=message):
        word_tokenizer(words)
