"""The text of one sample: what of it is settled, what may be shown already, and where a stop string ends it."""

from collections.abc import Sequence

import numpy as np

from detspec.checkpoint.detokenizer import Detokenizer, TokenBytes
from detspec.checkpoint.load import Model
from detspec.engine.request import FAILED, FINISH_REASONS, GIVEN, Request
from detspec.generation.commit import ending
from detspec.sampling_params import all_stop_ids
from detspec.state import STOP


def text_of(request: Request, tokens: TokenBytes | None) -> "GrowingText":
    """The text of the new tokens of `request`, none of which was read yet; no stop string ends that of given tokens."""
    detokenizer = Detokenizer(tokens, after=request.prompt_token_ids)
    stop = () if request.given_token_ids else request.sampling.stop
    return GrowingText(detokenizer, stop, min_tokens=request.sampling.min_tokens)


def ending_of(
    request: Request, token_ids: Sequence[int], targets: np.ndarray, logprobs: np.ndarray, model: Model
) -> tuple[int, str | None, str]:
    """Finds where the canonical text of `request` ends that begins with `token_ids`, `n` of them.

    Args:
        request: one sample, or given tokens that are scored.
        token_ids: new tokens, or those that are given.
        targets: `[n + 1]` int32, canonical tokens there and after them; `[n]` if there is no room for more.
        logprobs: float32, their log-probabilities.
        model: the model.

    Returns:
        How many of `token_ids` the text has, its finish reason (None if it goes on after them), and what it says.
    """
    most = request.sampling.max_tokens
    length = min(len(token_ids), most)
    text = text_of(request, model.token_bytes)
    finish_reason: str | None
    if request.given_token_ids:
        finish_reason = FAILED if np.isnan(logprobs).any() else GIVEN
        finish_reason = finish_reason if length == most else None
    else:
        is_stop = np.isin(targets, all_stop_ids(request.sampling, model.eos_ids))
        offered = np.asarray([min(len(targets), most)], np.int32)
        num_taken, finish = ending(is_stop[None, :], logprobs[None, :], offered, np.asarray([most], np.int32))
        is_over = num_taken[0] <= len(token_ids)  # else by the token that follows
        finish_reason = FINISH_REASONS.get(int(finish[0])) if is_over else None
        length = min(length, int(num_taken[0]))
    text.read(token_ids[:length])
    if text.is_stopped:
        return text.num_tokens, FINISH_REASONS[STOP], text.text
    return length, finish_reason, text.whole


class GrowingText:
    """The settled text of new tokens, which ends at the first token whose settled text holds a stop string.

    Tokens are read one at a time, so where a text ends does not depend on when they were looked at.

    Attributes:
        text: the settled text, up to the stop string once there is one.
        num_tokens: tokens that were read; the one that completes a stop string is the last.
        is_stopped: a stop string has ended the text.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        """Begins after what `detokenizer` has read. No string of `stop` that ends within the first `min_tokens` counts."""
        self._detokenizer = detokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self.text = ""
        self.num_tokens = 0
        self.is_stopped = False

    def read(self, tokens: Sequence[int]) -> None:
        """Reads the next `tokens`; those after a stop string are void, and are not read."""
        if not self._stop:
            self.text += self._detokenizer.read(tokens)
            self.num_tokens += len(tokens)
            return
        for token in tokens:
            if self.is_stopped:
                return
            before = len(self.text)
            self.text += self._detokenizer.push(token)
            self.num_tokens += 1
            if self.num_tokens > self._min_tokens:
                self._look(before)

    def _look(self, known: int) -> None:
        """Ends the text in front of a stop string that ends after its first `known` characters, if there is one."""
        found = [self.text.find(string, max(0, known - len(string) + 1)) for string in self._stop]
        if begin := [place for place in found if place >= 0]:
            self.text = self.text[: min(begin)]
            self.is_stopped = True

    @property
    def shown(self) -> str:
        """The part of an unfinished text that will stay: not an end that a stop string may begin with."""
        longest = max(map(len, self._stop), default=0)
        for start in range(max(0, len(self.text) - longest + 1), len(self.text)):
            if any(string.startswith(self.text[start:]) for string in self._stop):
                return self.text[:start]
        return self.text

    @property
    def whole(self) -> str:
        """The text if no token follows: a character that lacks bytes reads as U+FFFD."""
        return self.text if self.is_stopped else self.text + self._detokenizer.rest
