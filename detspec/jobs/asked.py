"""A line of input as what it asks the engine for, and the lines of output that come of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from detspec.engine.request import Completion, Request
from detspec.jobs.lines import completion_line


@dataclasses.dataclass(frozen=True)
class Output:
    """One line of output.

    Attributes:
        index: its number among the lines of output of one line of input.
        num_tokens: new tokens in it.
        finish_reason: that of a completion; "error" for what failed.
        line: the bytes, without newline.
    """

    index: int
    num_tokens: int
    finish_reason: str
    line: bytes


class Asked(Protocol):
    """A line of input."""

    @property
    def number(self) -> int:
        """Its place among the lines of input, from 0."""

    @property
    def requests(self) -> Sequence[Request]:
        """What to generate or to score."""

    @property
    def num_outputs(self) -> int:
        """Lines of output that will come of it."""

    def ready(self) -> Sequence[Output]:
        """Lines of output that are there without any completion."""

    def take(self, completion: Completion) -> Sequence[Output]:
        """Lines of output that are there with one more completion of `requests`."""


class AskedRequest:
    """A line of our own format: one request, and a line of output for each of its samples."""

    def __init__(self, number: int, request: Request, metadata: dict[str, Any] | None = None) -> None:
        """`metadata` is what each line of output repeats."""
        self.number = number
        self.requests = (request,)
        self.num_outputs = request.sampling.n
        self._metadata = metadata

    def ready(self) -> Sequence[Output]:
        """Nothing."""
        return ()

    def take(self, completion: Completion) -> Sequence[Output]:
        """The line of the completion."""
        line = completion_line(completion, self.requests[0].sampling.n, self._metadata)
        return (Output(completion.index, len(completion.token_ids), completion.finish_reason, line),)
