"""Log-probabilities in the shapes of completions, of chat, and of vLLM's `prompt_logprobs`, and the tokens that they name."""

import functools
import math
from collections.abc import Sequence
from typing import Any

from detspec.checkpoint.detokenizer import CACHED, Detokenizer, TokenBytes
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.engine.request import Completion, TopLogprobs
from detspec.openai.bodies import Parsed

EXCLUDED = -9999.0  # stands for -inf and nan, which JSON lacks


class TokenTexts:
    """Bytes and texts of the tokens of one tokenizer. Without a tokenizer a token's text is its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Names the tokens of `tokenizer`."""
        self.tokens = None if tokenizer is None else tokenizer.token_bytes
        self.bytes_of = functools.lru_cache(maxsize=CACHED)(self._bytes_of)
        self.text_of = functools.lru_cache(maxsize=CACHED)(self._text_of)

    def _text_of(self, token: int, begins: bool = False) -> str:
        r"""Text of a token; for bytes that are no whole characters `bytes:\xe2\x80`, so that no two of them look the same."""
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


def logprobs_of(
    parsed: Parsed, completion: Completion, texts: TokenTexts, places: TokenPlaces | None = None
) -> dict[str, Any] | None:
    """Makes the field `logprobs` of a choice; None if it is not asked for.

    `places` have seen the tokens before, if the completion is a part of a stream.
    """
    if parsed.logprobs is None:
        return None
    if places is None:
        places = TokenPlaces(texts.tokens, () if parsed.echo else completion.prompt_token_ids)
    return (_chat_logprobs if parsed.kind == "chat" else _completion_logprobs)(parsed, completion, texts, places)


def _completion_logprobs(parsed: Parsed, completion: Completion, texts: TokenTexts, places: TokenPlaces) -> dict[str, Any]:
    """Lists `tokens`, `token_logprobs`, `top_logprobs` and `text_offset`, of the prompt too if it is echoed.

    The first token of a prompt has null, and all have if the request was aborted before they were read. `top_logprobs` hold the
    chosen token, too; of two tokens of one text, they hold the likelier. `text_offset` counts the characters that are complete
    before a token, from the first token on; special tokens have none.
    """
    number = parsed.logprobs or 0
    tokens: list[int] = []
    logprobs: list[float | None] = []
    top: list[TopLogprobs] = []
    if parsed.echo:
        tokens += completion.prompt_token_ids
        logprobs += of_prompt(completion)
        top += likeliest(completion.prompt_top_logprobs, number, len(completion.prompt_token_ids))
    tokens += completion.token_ids
    logprobs += completion.logprobs
    top += likeliest(completion.top_logprobs, number, len(completion.token_ids))
    at = list(map(places.next, tokens))
    return {
        "tokens": [name_of(token, parsed, texts, begins) for token, (_, begins) in zip(tokens, at, strict=True)],
        "token_logprobs": [None if value is None else number_of(value) for value in logprobs],
        "top_logprobs": [
            None if value is None else _by_name([(token, value), *listed], parsed, texts, begins)
            for token, value, listed, (_, begins) in zip(tokens, logprobs, top, at, strict=True)
        ]
        if number
        else None,
        "text_offset": [offset for offset, _ in at],
    }


def _chat_logprobs(parsed: Parsed, completion: Completion, texts: TokenTexts, places: TokenPlaces) -> dict[str, Any]:
    """Lists as `content` the `token`, `logprob`, `bytes` and `top_logprobs` of each new token, the likeliest first."""
    tops = likeliest(completion.top_logprobs, parsed.logprobs or 0, len(completion.token_ids))
    content = []
    for token, value, top in zip(completion.token_ids, completion.logprobs, tops, strict=True):
        _, begins = places.next(token)
        listed = [_chat_entry(other, number, parsed, texts, begins) for other, number in top]
        content.append({**_chat_entry(token, value, parsed, texts, begins), "top_logprobs": listed})
    return {"content": content, "refusal": None}


def prompt_logprobs(parsed: Parsed, completion: Completion, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Lists for each token of the prompt it and the likeliest there, by token id; null for the first, as vLLM has them.

    All are null if the request was aborted before they were read.
    `rank` counts from 1, and is null for a token of the prompt that is not among the likeliest.
    """
    values = of_prompt(completion)
    tops = likeliest(completion.prompt_top_logprobs, parsed.body.prompt_logprobs or 0, len(values))
    found: list[dict[str, Any] | None] = []
    for token, value, top in zip(completion.prompt_token_ids, values, tops, strict=True):
        if value is None:
            found.append(None)
            continue
        ranked = {other: (number, rank) for rank, (other, number) in enumerate(top, start=1)}
        each = {token: ranked.get(token, (value, None)), **ranked}
        found.append(
            {
                str(other): {"logprob": number_of(number), "rank": rank, "decoded_token": name_of(other, parsed, texts)}
                for other, (number, rank) in each.items()
            }
        )
    return found


def of_prompt(completion: Completion) -> Sequence[float | None]:
    """Log-probabilities of the prompt; None for each token if the request was aborted before they were read."""
    return completion.prompt_logprobs or [None] * len(completion.prompt_token_ids)


def likeliest(top: Sequence[TopLogprobs], number: int, length: int) -> list[TopLogprobs]:
    """The `number` likeliest at each of `length` positions, of which a completion may hold more, or none if none were asked."""
    return [entry[:number] for entry in top] if top else [()] * length


def number_of(logprob: float) -> float:
    """A log-probability as JSON can have it. Every float32 is a float64, so its bits survive."""
    return float(logprob) if math.isfinite(logprob) else EXCLUDED


def name_of(token: int, parsed: Parsed, texts: TokenTexts, begins: bool = False) -> str:
    """The name of a token in an answer; a token that `begins` a text may read otherwise than it does later."""
    return f"token_id:{token}" if parsed.body.return_tokens_as_token_ids else texts.text_of(token, begins)


def _by_name(pairs: Sequence[tuple[int, float]], parsed: Parsed, texts: TokenTexts, begins: bool) -> dict[str, float]:
    """Pairs of token and log-probability by name, the likeliest first, ties in the order given."""
    found: dict[str, float] = {}
    for token, value in sorted(pairs, key=lambda pair: -number_of(pair[1])):
        found.setdefault(name_of(token, parsed, texts, begins), number_of(value))
    return found


def _chat_entry(token: int, value: float, parsed: Parsed, texts: TokenTexts, begins: bool) -> dict[str, Any]:
    name = name_of(token, parsed, texts, begins)
    return {"token": name, "logprob": number_of(value), "bytes": list(texts.bytes_of(token, begins))}
