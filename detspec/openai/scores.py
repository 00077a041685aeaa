"""Bodies with `max_tokens: 0` and `echo`: prompts as requests to score them, and their scores as answers without new tokens."""

import dataclasses
from collections.abc import Sequence

from detspec.engine.request import GIVEN, Completion, Request


def scoring(request: Request) -> Request:
    """`request` for log-probabilities of its prompt as one that scores all tokens after the first."""
    first, *rest = request.prompt_token_ids
    if not rest:
        return request  # there is nothing to score: one token is generated, and not shown
    sampling = dataclasses.replace(
        request.sampling, prompt_logprobs=None, logprobs=request.sampling.prompt_logprobs or 0, thinking=None
    )
    return dataclasses.replace(request, prompt_token_ids=(first,), sampling=sampling, given_token_ids=tuple(rest))


def scored(completion: Completion, prompt: Sequence[int]) -> Completion:
    """What was found of a scored text as a completion without new tokens after the whole text as its prompt."""
    given = completion.finish_reason == GIVEN
    is_read = completion.finish_reason not in ("abort", "error")
    return dataclasses.replace(
        completion,
        prompt_token_ids=tuple(prompt),
        token_ids=(),
        logprobs=(),
        text="",
        top_logprobs=(),
        finish_reason="length" if is_read else completion.finish_reason,
        prompt_logprobs=(None, *(completion.logprobs if given else ())) if is_read else (),
        prompt_top_logprobs=((), *completion.top_logprobs) if given and completion.top_logprobs else (),
    )
