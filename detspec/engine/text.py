"""The text of one sample: what of it is settled, what may be shown already, and where a stop string ends it."""

from collections.abc import Sequence

from detspec.checkpoint.detokenizer import Detokenizer, TokenBytes
from detspec.engine.request import Request


def text_of(request: Request, tokens: TokenBytes | None) -> "GrowingText":
    """The text of the new tokens of `request`, none of which was read yet; no stop string ends that of given tokens."""
    detokenizer = Detokenizer(tokens, after=request.prompt_token_ids)
    stop = () if request.given_token_ids else request.sampling.stop
    return GrowingText(detokenizer, stop, min_tokens=request.sampling.min_tokens)


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
