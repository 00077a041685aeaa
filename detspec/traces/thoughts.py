"""A record of how a prompt was read with thoughts: its chunks, their thoughts, and the passes that committed them.

Worked example, six chunks, all drafts trivial, two thoughts that are not (a, b):

    chunk      0     1     2     3     4     5
    pass 1     ✓     a     void  void  void          read 2: the draft after chunk 1 was rejected, so what follows is void
    pass 2                 ✓     b     void          read 4
    pass 3                             ✓             read 5
    answer                                   read with the state of the thought before it, here 0, then continued
"""

import dataclasses

from detspec.errors import InputError


@dataclasses.dataclass(frozen=True)
class ThoughtText:
    """The tokens of one thought as text, without its end token."""

    tokens: tuple[str, ...] = ()  # none for a trivial thought
    ended: bool = True  # whether the end token came

    @property
    def trivial(self) -> bool:
        """Whether there was nothing to think, so that the state is 0."""
        return not self.tokens


@dataclasses.dataclass(frozen=True)
class ThoughtPass:
    """A canonical pass over the next chunks; `InputError` if the numbers contradict each other."""

    first: int  # the first chunk it read; thoughts after earlier chunks were committed before
    drafts: tuple[ThoughtText, ...]  # the drafted thought after each chunk it read
    accepted: int  # how many leading drafts equal the pass's own thoughts
    thoughts: tuple[ThoughtText, ...]  # committed thoughts: the accepted drafts, then its own thought for a rejected one
    length: int  # valid cache slots after it

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= len(self.drafts):
            raise InputError(f"accepted must be between 0 and {len(self.drafts)} (drafts), got {self.accepted}")
        committed = min(self.accepted + 1, len(self.drafts))
        if len(self.thoughts) != committed:
            raise InputError(
                f"a pass that accepts {self.accepted} of {len(self.drafts)} drafts commits {committed} thoughts, "
                f"got {len(self.thoughts)}"
            )

    @property
    def read(self) -> int:
        """Number of chunks whose thoughts are committed after it."""
        return self.first + len(self.thoughts)

    @property
    def end(self) -> int:
        """Index after the last chunk it read."""
        return self.first + len(self.drafts)

    @property
    def rejected(self) -> bool:
        """Whether a draft was rejected."""
        return self.accepted < len(self.drafts)


@dataclasses.dataclass(frozen=True)
class ThoughtTrace:
    """A prompt that was read with thoughts, and its answer.

    Raises `InputError` if there is no thought to show, or the passes do not follow each other.
    """

    chunks: tuple[tuple[str, ...], ...]  # the tokens of the prompt as text, cut in chunks
    # the passes that read all chunks but the last, in order; a thought follows each chunk they read
    passes: tuple[ThoughtPass, ...]
    answer: tuple[str, ...]  # the new tokens as text
    chunk: int  # tokens of a chunk, `C`
    # `(in_layer, out_layer, num_layers)`: states are added after the first, thoughts are read off after the second
    layers: tuple[int, int, int]
    title: str  # a line for the picture: model, source of the drafts

    def __post_init__(self) -> None:
        if len(self.chunks) < 2:
            raise InputError(f"a thought follows every chunk but the last, got {len(self.chunks)} chunks: nothing to draw")
        last = len(self.chunks) - 1
        reached = 0
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
    def thoughts(self) -> tuple[ThoughtText, ...]:
        """The thought after each chunk but the last."""
        return tuple(thought for one in self.passes for thought in one.thoughts)
