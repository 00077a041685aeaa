"""Answers of engines as plain values, and the number of tokens in which two answers differ."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from detspec.engine.request import ABORTED, Completion


class Answer(NamedTuple):
    """The deterministic facts of a sample."""

    token_ids: list[int]
    bits: list[int]  # of the float32 log-probabilities
    text: str
    finish_reason: str

    @classmethod
    def of(cls, completion: Completion) -> "Answer":
        """The answer in a completion."""
        return cls(list(completion.token_ids), bits_of(completion.logprobs), completion.text, completion.finish_reason)


Answers = Mapping[str, Answer]  # by id and number of the sample, see `name_of`


def name_of(id: str, index: int) -> str:
    """The name of a sample."""
    return f"{id}/{index}"


def bits_of(logprobs: Iterable[float | None] | np.ndarray) -> list[int]:
    """The bits of float32 numbers, as integers."""
    return np.asarray(list(logprobs), np.float32).view(np.uint32).tolist()


def num_different(pairs: Iterable[tuple[Answer, Answer]]) -> tuple[int, int]:
    """In how many tokens answers differ from expected ones, in id or log-probability bits, and how many were compared.

    A text that is too short or too long, or ends for another reason, is one difference more. An aborted one may be short.
    """
    differ = compared = 0
    for answer, expected in pairs:
        found = zip(answer.token_ids, answer.bits, strict=True)
        differ += sum(
            one != other for one, other in zip(found, zip(expected.token_ids, expected.bits, strict=True), strict=False)
        )
        compared += len(answer.token_ids)
        if answer.finish_reason == ABORTED:
            is_part = len(answer.token_ids) <= len(expected.token_ids) and expected.text.startswith(answer.text)
            differ += not is_part
        else:
            differ += ending(answer) != ending(expected)
    return differ, compared


def ending(answer: Answer) -> tuple[int, str, str]:
    """How long it is, its text, and why it ended."""
    return len(answer.token_ids), answer.text, answer.finish_reason
