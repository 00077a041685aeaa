"""Log-probabilities in the shapes of completions, of chat, and of vLLM's `prompt_logprobs`."""

import math
from collections.abc import Sequence
from typing import Any

from detspec.engine.request import Completion, TopLogprobs
from detspec.openai.bodies import Parsed
from detspec.openai.token_texts import TokenPlaces, TokenTexts

EXCLUDED = -9999.0  # stands for -inf and nan, which JSON lacks


def completion_logprobs(
    parsed: Parsed, completion: Completion, texts: TokenTexts, places: TokenPlaces | None = None
) -> dict[str, Any]:
    """`tokens`, `token_logprobs`, `top_logprobs` and `text_offset`, of the prompt too if it is echoed.

    `places` have seen the tokens before, if the completion is a part of a stream.

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
    at = _placed(parsed, completion, tokens, texts, places)
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


def chat_logprobs(
    parsed: Parsed, completion: Completion, texts: TokenTexts, places: TokenPlaces | None = None
) -> dict[str, Any]:
    """`content`: `token`, `logprob`, `bytes` and `top_logprobs` of each new token, the likeliest first.

    `places` as for `completion_logprobs`.
    """
    tops = likeliest(completion.top_logprobs, parsed.logprobs or 0, len(completion.token_ids))
    content = []
    at = _placed(parsed, completion, completion.token_ids, texts, places)
    for token, value, top, (_, begins) in zip(completion.token_ids, completion.logprobs, tops, at, strict=True):
        listed = [_chat_entry(other, number, parsed, texts, begins) for other, number in top]
        content.append({**_chat_entry(token, value, parsed, texts, begins), "top_logprobs": listed})
    return {"content": content, "refusal": None}


def prompt_logprobs(parsed: Parsed, completion: Completion, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """For each token of the prompt, it and the likeliest there, by token id; null for the first, as vLLM has them.

    All are null if the request was aborted before they were read.
    `rank` counts from 1, and is null for a token of the prompt that is not among the likeliest.
    """
    values = of_prompt(completion)
    tops = likeliest(completion.prompt_top_logprobs, parsed.prompt_logprobs or 0, len(values))
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
    return f"token_id:{token}" if parsed.tokens_as_ids else texts.text_of(token, begins)


def _placed(
    parsed: Parsed, completion: Completion, tokens: Sequence[int], texts: TokenTexts, places: TokenPlaces | None
) -> list[tuple[int, bool]]:
    """For each of `tokens`, the characters before it, and whether it begins a text."""
    if places is None:
        places = TokenPlaces(texts.tokens, () if parsed.echo else completion.prompt_token_ids)
    return list(map(places.next, tokens))


def _by_name(pairs: Sequence[tuple[int, float]], parsed: Parsed, texts: TokenTexts, begins: bool) -> dict[str, float]:
    """Pairs of token and log-probability by name, the likeliest first, ties in the order given."""
    found: dict[str, float] = {}
    for token, value in sorted(pairs, key=lambda pair: -number_of(pair[1])):
        found.setdefault(name_of(token, parsed, texts, begins), number_of(value))
    return found


def _chat_entry(token: int, value: float, parsed: Parsed, texts: TokenTexts, begins: bool) -> dict[str, Any]:
    name = name_of(token, parsed, texts, begins)
    return {"token": name, "logprob": number_of(value), "bytes": list(texts.bytes_of(token, begins))}
