"""A record of one request: its windows of draft, verify and commit, as text and plain numbers.

Worked example, W = 4, T0 at position 35:

    prefill   decode    verify          rollback
    T0        T0        T0              T0         slot 35
              T1'       T1 (=T1')  ✓    T1         slot 36
              T2'       T2 (=T2')  ✓    T2         slot 37   <- length 38
              T3'       T3 (≠T3')  ✗    T3         the correction; opens the next window
                        T4         ✗
"""

import dataclasses

from detspec.errors import InputError


@dataclasses.dataclass(frozen=True)
class TraceWindow:
    """A window of a request; `InputError` if the numbers contradict each other."""

    start: int  # position of `last_token` in the sequence
    last_token: str  # T0, the committed token that opens the window; its K/V was not yet written
    drafted: tuple[str, ...]  # T1', T2', ...
    targets: tuple[str, ...]  # T1, T2, ...: what the canonical pass chose after T0, T1', ...; one more than `drafted`
    accepted: int  # how many drafted tokens agreed with their targets
    committed: tuple[str, ...]  # the tokens this window added, with the correction or bonus; fewer if the text stopped
    length_before: int  # valid cache slots when the window opened
    length_drafted: int  # cache slots in use after the draft
    length_after: int  # valid cache slots after the commit

    def __post_init__(self) -> None:
        if len(self.targets) != len(self.drafted) + 1:
            raise InputError(f"a window has one target more than drafts, got {len(self.targets)} and {len(self.drafted)}")
        if not 0 <= self.accepted <= len(self.drafted):
            raise InputError(f"accepted must be between 0 and {len(self.drafted)} (drafted tokens), got {self.accepted}")
        if not 1 <= len(self.committed) <= self.accepted + 1:
            raise InputError(f"a window commits 1 to accepted + 1 = {self.accepted + 1} tokens, got {len(self.committed)}")

    @property
    def rolled_back(self) -> bool:
        """Whether a drafted token was rejected."""
        return self.accepted < len(self.drafted)

    @property
    def length_verified(self) -> int:
        """Cache slots that hold K/V of the canonical pass before the commit, those of T0 and all drafted tokens included."""
        return self.start + 1 + len(self.drafted)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A request from its prompt on."""

    prompt: tuple[str, ...]  # tokens of the prompt as text
    windows: tuple[TraceWindow, ...]  # all windows in order; the prompt's last token opens the first one
    num_others: int  # how many other requests were in the batch
    title: str  # a line for the picture: model, draft, sampling


def default_windows(trace: Trace) -> tuple[int, ...]:
    """Indices of the first drafted window without rollback and of the first with one, in the order of the trace."""
    drafted = [(index, window.rolled_back) for index, window in enumerate(trace.windows) if window.drafted]
    first = {rolled_back: index for index, rolled_back in reversed(drafted)}
    return tuple(sorted(first.values())) or tuple(range(len(trace.windows)))[:1]
