"""The picture of a prompt that is read with thoughts: what was thought after each chunk, and the passes that found it out.

Worked example, six chunks, all guesses trivial, two thoughts that are not (a, b):

    chunk      0     1     2     3     4     5
    pass 1     ✓     a     void  void  void          read 2: chunk 1 was thought about, so what followed was void
    pass 2                 ✓     b     void          read 4
    pass 3                             ✓             read 5
    answer                                   read with the state of the thought before it, 0 here, and continued
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from detspec.errors import InputError
from detspec.viz.saving import matplotlib_needed, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COLUMNS = 7  # more chunks than that leave out a run in the middle
MAX_LINES = 9  # the same for passes


@dataclasses.dataclass(frozen=True)
class Thought:
    """Its tokens as text without the one that ends it, and whether that one came; a trivial thought is nothing but its end."""

    tokens: tuple[str, ...] = ()
    ended: bool = True

    @property
    def trivial(self) -> bool:
        """Whether there was nothing to think, so that its state is 0."""
        return not self.tokens


@dataclasses.dataclass(frozen=True)
class ThoughtPass:
    """One canonical pass over the next chunks.

    Attributes:
        first: the first chunk it read; thoughts after earlier ones were committed before.
        guesses: the guessed thought after each chunk it read.
        accepted: how many leading guesses were right.
        thoughts: what it committed: the right guesses, then its own thought in place of the first wrong one.
        read: chunks whose thoughts are committed after it.
        length: valid cache slots after it.
    """

    first: int
    guesses: tuple[Thought, ...]
    accepted: int
    thoughts: tuple[Thought, ...]
    read: int
    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= len(self.guesses):
            raise InputError(f"accepted must be between 0 and {len(self.guesses)} (guesses), got {self.accepted}")
        committed = min(self.accepted + 1, len(self.guesses))
        if len(self.thoughts) != committed:
            raise InputError(
                f"a pass that accepts {self.accepted} of {len(self.guesses)} guesses commits {committed} thoughts, "
                f"got {len(self.thoughts)}"
            )
        if self.read != self.first + committed:
            raise InputError(f"a pass that commits {committed} thoughts from {self.first} on ends at read {self.read}")

    @property
    def end(self) -> int:
        """One past the last chunk it read."""
        return self.first + len(self.guesses)

    @property
    def refused(self) -> bool:
        """Whether a guess was wrong."""
        return self.accepted < len(self.guesses)


@dataclasses.dataclass(frozen=True)
class ThoughtTrace:
    """A prompt that was read with thoughts, and its answer.

    Attributes:
        chunks: the tokens of the prompt as text, cut in chunks.
        passes: those that read the chunks but the last, in order; each chunk that they read is followed by a thought.
        answer: the tokens that the model went on with, as text.
        chunk: tokens of a chunk, `C`.
        layers: `(in_layer, out_layer, num_layers)`: states are added after the first of them, thoughts read after the second.
        title: a line over the picture: model, who guessed.
    """

    chunks: tuple[tuple[str, ...], ...]
    passes: tuple[ThoughtPass, ...]
    answer: tuple[str, ...]
    chunk: int
    layers: tuple[int, int, int]
    title: str

    def __post_init__(self) -> None:
        if len(self.chunks) < 2:
            raise InputError(f"a thought follows every chunk but the last, got {len(self.chunks)} chunks: nothing to draw")
        last, reached = len(self.chunks) - 1, 0
        for one in self.passes:
            if one.first != reached or one.end > last:
                raise InputError(
                    f"a pass over chunks {one.first} to {one.end - 1} does not go on from chunk {reached} up to chunk "
                    f"{last - 1} at most"
                )
            reached = one.read
        if reached != last:
            raise InputError(f"the passes commit {reached} thoughts, and {last} chunks are followed by one")

    @property
    def thoughts(self) -> tuple[Thought, ...]:
        """One after each chunk but the last."""
        return tuple(thought for one in self.passes for thought in one.thoughts)


def thought_figure(trace: ThoughtTrace) -> "Figure":
    """Draws the chunks with states and thoughts, and the passes below them; long prompts leave out a run, and say so.

    Raises:
        InputError: matplotlib is missing.
    """
    with matplotlib_needed():
        from detspec.traces.draw_thoughts import draw_thoughts
    return draw_thoughts(trace)


def save_thoughts(trace: ThoughtTrace, path: str | Path) -> list[Path]:
    """Writes `path.svg` (the same bytes for the same trace) and `path.png`; needs no display. Returns the two paths."""
    return save_figure(thought_figure(trace), path)


def shown_places(number: int, most: int) -> list[int | None]:
    """Which of `number` things are drawn: all, or the first and the last of them with None between for those left out.

    12 things, at most 7: 0 1 2 3 None 10 11
    """
    if number <= most:
        return list(range(number))
    tail = most // 3
    return [*range(most - 1 - tail), None, *range(number - tail, number)]


def shown_passes(trace: ThoughtTrace, chunks: Collection[int]) -> list[int | None]:
    """Which passes are drawn under those `chunks`: the ones that read any of them; None stands for a run left out."""
    reading = [i for i, one in enumerate(trace.passes) if any(one.first <= chunk < one.end for chunk in chunks)]
    kept = [reading[place] for place in shown_places(len(reading), MAX_LINES) if place is not None]
    lines: list[int | None] = []
    for previous, number in zip([-1, *kept], kept, strict=False):
        lines += [number] if number == previous + 1 else [None, number]
    return lines
