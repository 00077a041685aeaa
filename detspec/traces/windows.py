"""The picture of a request: what one window of draft, verify and commit did to its tokens and to its KV cache.

A column per stage and a line per token, T0 above. Worked example, W = 4, T0 at position 35:

    prefill   decode    verify          rollback
    T0        T0        T0              T0         slot 35
              T1'       T1 (=T1')  ✓    T1         slot 36
              T2'       T2 (=T2')  ✓    T2         slot 37   <- length 38
              T3'       T3 (≠T3')  ✗    T3         the correction; opens the next window
                        T4         ✗
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from detspec.errors import InputError
from detspec.viz.saving import matplotlib_needed, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LINES = 18


@dataclasses.dataclass(frozen=True)
class TraceWindow:
    """One window of one request, as text and plain numbers.

    Attributes:
        start: position of `last_token` in the sequence.
        last_token: T0, the committed token that opens the window; its K/V was not yet written.
        drafted: T1', T2', ...
        targets: T1, T2, ...: what the canonical pass chose after T0, T1', ...; one more than drafted.
        accepted: how many drafted tokens agreed with their targets.
        committed: the tokens this window added, correction or bonus included; shorter where the text stopped.
        length_before: valid cache slots when the window opened.
        length_drafted: cache slots in use after the draft.
        length_after: valid cache slots after the commit.
    """

    start: int
    last_token: str
    drafted: tuple[str, ...]
    targets: tuple[str, ...]
    accepted: int
    committed: tuple[str, ...]
    length_before: int
    length_drafted: int
    length_after: int

    def __post_init__(self) -> None:
        if len(self.targets) != len(self.drafted) + 1:
            raise InputError(
                f"a window has one target more than drafted tokens, got {len(self.targets)} and {len(self.drafted)}"
            )
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
        """Cache slots that hold K/V of the canonical pass before the commit: those of T0 and of every drafted token too."""
        return self.start + 1 + len(self.drafted)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A request from its prompt on.

    Attributes:
        prompt: its tokens as text.
        windows: all windows in order, the first one opened by the last token of the prompt.
        other_rows: how many other requests were in the batch.
        title: a line over the picture: model, fingerprint.
    """

    prompt: tuple[str, ...]
    windows: tuple[TraceWindow, ...]
    other_rows: int
    title: str


def trace_figure(trace: Trace, windows: Sequence[int] | None = None) -> "Figure":
    """Draws the windows of those indices, one below the other.

    Without `windows`: the first in which all drafted tokens were accepted and the first with a rollback, where there are such.

    Raises:
        InputError: matplotlib is missing, or there is no such window.
    """
    with matplotlib_needed():
        from detspec.traces.draw_windows import draw_trace

    chosen = default_windows(trace) if windows is None else tuple(windows)
    for index in chosen:
        if not 0 <= index < len(trace.windows):
            raise InputError(f"the trace has windows 0 to {len(trace.windows) - 1}, asked for {index}")
    if not chosen:
        raise InputError("the trace has no window to draw")
    return draw_trace(trace, chosen)


def save_trace(trace: Trace, path: str | Path, windows: Sequence[int] | None = None) -> list[Path]:
    """Writes `path.svg` (the same bytes for the same trace) and `path.png`; needs no display. Returns the two paths."""
    return save_figure(trace_figure(trace, windows), path)


def default_windows(trace: Trace) -> tuple[int, ...]:
    """Indices of the first drafted window without rollback and of the first with one, in the order of the trace."""
    drafted = [(index, window.rolled_back) for index, window in enumerate(trace.windows) if window.drafted]
    first = {rolled_back: index for index, rolled_back in reversed(drafted)}
    return tuple(sorted(first.values())) or tuple(range(len(trace.windows)))[:1]


def shown_tokens(window: TraceWindow) -> list[int | None]:
    """Which of T0 ... T_W get a line; None stands for a run left out.

    A long window keeps its beginning, its end and the surroundings of its last accepted token.
    """
    last = len(window.targets)
    if last < MAX_LINES:
        return list(range(last + 1))
    near = range(window.accepted - 3, window.accepted + 4)
    kept = sorted(i for i in {*range(5), *near, last - 2, last - 1, last} if 0 <= i <= last)
    lines: list[int | None] = []
    for previous, i in zip([-1, *kept], kept, strict=False):
        lines += [i] if i == previous + 1 else [None, i]
    return lines
