"""Words of problems: names of people, and a tokenizer of whole words for problems with a known list of them."""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from detspec.checkpoint.tokenizer import unencodable
from detspec.errors import InputError

END = "<|end|>"  # ends texts and thoughts
END_ID = 0
FILLER = "<|filler|>"  # in front of a prompt, it shifts the borders of the chunks
FILLER_ID = 1

# one word each, none of which occurs in a question otherwise
NAMES = (
    *("Alice", "Bob", "Carol", "David", "Erin", "Frank", "Grace", "Henry", "Irene", "Jack"),
    *("Karen", "Leo", "Maria", "Nathan", "Olga", "Peter", "Quinn", "Rosa", "Samuel", "Tina"),
    *("Ursula", "Victor", "Wanda", "Xavier", "Yara", "Zoe", "Adam", "Bella", "Carlos", "Diana"),
    *("Edgar", "Fiona", "George", "Hannah", "Ivan", "Julia", "Kevin", "Laura", "Martin", "Nora"),
    *("Oscar", "Paula", "Ralph", "Sara", "Thomas", "Ulrich", "Vera", "Walter", "Yusuf", "Zelda"),
    *("Anton", "Bruno", "Clara", "Dora", "Emil", "Felix", "Gina", "Hugo", "Ida", "Jonas"),
    *("Kira", "Lena", "Milan", "Nina"),
)


def word_tokenizer(words: Sequence[str]) -> tokenizers.Tokenizer:
    """A tokenizer with one token for each of `words`, in order from id 2: "coin's state?" becomes `coin ' s state ?`.

    Decoding restores the blanks. Raises `InputError` if a word is given twice or is not one token.
    """
    if len(set(words)) != len(words):
        raise InputError(f"words given twice: {', '.join(sorted({word for word in words if words.count(word) > 1}))}")
    if cut := [word for word in words if split(word) != [word]]:
        raise InputError(f"not one word each: {', '.join(map(repr, cut))}; a word is letters and digits, or signs")
    # The unknown token is not in the vocabulary, so the library raises for unknown words.
    model = models.WordLevel({END: END_ID, FILLER: FILLER_ID} | {word: id for id, word in enumerate(words, 2)}, "")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # First a blank before every word except the first; then the blanks before signs and after apostrophes are removed.
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="\n", cleanup=False),  # no word contains the prefix
            decoders.Fuse(),
            decoders.Replace(tokenizers.Regex(r" (?=[.,;:?'])|(?<=') "), ""),
        ]
    )
    tokenizer.add_special_tokens([END, FILLER])
    return tokenizer


def words_in(*texts: str) -> tuple[str, ...]:
    """The distinct words of `texts`, in the order of their first occurrence."""
    return tuple(dict.fromkeys(word for text in texts for word in split(text)))


def split(text: str) -> list[str]:
    """Splits `text` as the tokenizer does: into runs of letters and digits, and runs of signs."""
    return [word for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(text)]


def encode_texts(
    tokenizer: tokenizers.Tokenizer, texts: Iterable[str], *, add_special_tokens: bool = False
) -> list[tokenizers.Encoding]:
    """Encodes `texts`; `InputError` names the text that cannot be encoded, and its unknown words."""
    texts = list(texts)
    try:
        return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    except Exception:  # the library raises a bare Exception that does not name the text
        for text in texts:
            try:
                tokenizer.encode(text, add_special_tokens=add_special_tokens)
            except Exception as error:
                raise unencodable(tokenizer, text, error) from error
        raise
