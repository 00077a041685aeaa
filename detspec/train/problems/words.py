"""A tokenizer of whole words, for problems whose words are known."""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from detspec.checkpoint.tokenizer import unencodable
from detspec.errors import InputError

END, END_ID = "<|end|>", 0  # ends texts and thoughts
FILLER, FILLER_ID = "<|filler|>", 1  # stands in front of a prompt to shift where its chunks are cut


def word_tokenizer(words: Sequence[str]) -> tokenizers.Tokenizer:
    """One token for each of `words`, in their order from id 2: "coin's state?" is `coin ' s state ?`.

    Decoding puts the blanks back where they were. Raises `InputError` if a word is given twice or is not one token.
    """
    if len(set(words)) != len(words):
        raise InputError(f"words given twice: {', '.join(sorted({word for word in words if words.count(word) > 1}))}")
    cut = [word for word in words if split(word) != [word]]
    if cut:
        raise InputError(f"not one word each: {', '.join(map(repr, cut))}; a word is letters and digits, or signs")
    # The unknown token is no word of the vocabulary: the library then refuses to encode a word that is not in it.
    model = models.WordLevel({END: END_ID, FILLER: FILLER_ID} | {word: id for id, word in enumerate(words, 2)}, "")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # A blank before every word but the first; then none before signs, nor after an apostrophe.
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="\n", cleanup=False),  # no word holds the mark of a word's later part
            decoders.Fuse(),
            decoders.Replace(tokenizers.Regex(r" (?=[.,;:?'])|(?<=') "), ""),
        ]
    )
    tokenizer.add_special_tokens([END, FILLER])
    return tokenizer


def words_in(*texts: str) -> tuple[str, ...]:
    """The words of `texts`, each once, in the order they first stand in."""
    return tuple(dict.fromkeys(word for text in texts for word in split(text)))


def split(text: str) -> list[str]:
    """Runs of letters and digits, and runs of signs, as the tokenizer cuts them."""
    return [word for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(text)]


def encode_texts(
    tokenizer: tokenizers.Tokenizer, texts: Iterable[str], *, add_special_tokens: bool = False
) -> list[tokenizers.Encoding]:
    """What the library makes of `texts`; `InputError` names the text it cannot encode, and the words it does not know."""
    texts = list(texts)
    try:
        return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    except Exception:  # the library raises bare Exception, and does not say for which text
        for text in texts:
            try:
                tokenizer.encode(text, add_special_tokens=add_special_tokens)
            except Exception as error:
                raise unencodable(tokenizer, text, error) from error
        raise
