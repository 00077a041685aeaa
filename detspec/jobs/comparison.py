"""Comparison of two outputs, request by request: where texts fork, and which log-probabilities differ in bits."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from detspec.engine.bits import same_bits
from detspec.jobs.answers import Answer, AnyOutput, answers_of

MOST_SHOWN = 10  # forks in the table, and names in a line of it
FORK_COLUMNS = ("request", "fork at token", "a: token, text", "b: token, text")
SHOWN_CHARS = 24  # characters of a text from the fork on


@dataclasses.dataclass(frozen=True)
class Fork:
    """The first new token of a request that differs.

    Attributes:
        place: index in the new tokens; 0 is the first one after the prompt.
        token_ids: the token of `a` and that of `b`; None where the text has ended.
        texts: both texts from the first differing character on; "" without texts.
    """

    place: int
    token_ids: tuple[int | None, int | None]
    texts: tuple[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedText:
    """A request that both outputs have. Log-probabilities are compared up to the fork: after it, they are of other tokens.

    Attributes:
        name: its id, with the number of any sample but the first: `a[2]`; or its place, see `compare`.
        num_tokens: new tokens of `a` and of `b`.
        fork: where the texts go on differently; None if all tokens are equal.
        differs: bool `[n]`, True where log-probabilities of the `n` tokens before the fork have other bits.
        differences: float64 `[n]`, |difference| of these log-probabilities; infinite where one of them is no number.
    """

    name: str
    num_tokens: tuple[int, int]
    fork: Fork | None
    differs: np.ndarray
    differences: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare`, which prints as a table.

    Attributes:
        sides: the paths of `a` and `b`; "" for what is no file.
        texts: requests of both, in the order of `a`.
        differing_prompts: names of requests whose prompts, or modes of log-probabilities, differ; they are not compared.
        only_a: names of requests that only `a` has.
        only_b: names of requests that only `b` has.
    """

    sides: tuple[str, str]
    texts: tuple[ComparedText, ...]
    differing_prompts: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both have the same requests, with the same tokens and the same bits of log-probabilities."""
        return not (self.differing_prompts or self.only_a or self.only_b or self.num_forks or self.num_logprobs_differ)

    @property
    def num_forks(self) -> int:
        """Number of texts that differ."""
        return sum(text.fork is not None for text in self.texts)

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities that are compared."""
        return sum(text.differs.size for text in self.texts)

    @property
    def num_logprobs_differ(self) -> int:
        """Number of log-probabilities that have other bits."""
        return sum(int(text.differs.sum()) for text in self.texts)

    @property
    def largest_difference(self) -> float:
        """The largest |difference| of log-probabilities; 0 if there is none."""
        return max((float(text.differences.max(initial=0.0)) for text in self.texts), default=0.0)

    def __repr__(self) -> str:
        before = " before the forks" if self.num_forks else ""
        facts = [
            ("a", self.sides[0]),
            ("b", self.sides[1]),
            ("requests in both", f"{len(self.texts):,}"),
            ("texts that differ", f"{self.num_forks:,}"),
            ("log-probabilities that differ", f"{self.num_logprobs_differ:,} of {self.num_logprobs:,}{before}"),
            ("largest |difference|", f"{self.largest_difference:.3g}"),
            ("only in a", _some(self.only_a)),
            ("only in b", _some(self.only_b)),
            ("other prompts, not compared", _some(self.differing_prompts)),
        ]
        lines = _aligned([row for row in facts if row[1]])
        if self.num_forks:
            lines += ["", *_aligned([FORK_COLUMNS, *_fork_rows(self.texts)])]
        if self.num_forks > MOST_SHOWN:
            lines.append(f"and {self.num_forks - MOST_SHOWN:,} more")
        return "\n".join(lines)


def compare(a: AnyOutput, b: AnyOutput) -> Comparison:
    """Compares two outputs: tokens, and bits of log-probabilities.

    Requests are matched by id and number of the sample. Where an output has a name twice, as completions that were generated
    one by one have, the requests of both are matched by their places.

    Args:
        a: an output: completions of an engine, the state that `detspec.generate` returns, or the path of a file that `detspec
            generate` or `detspec convert-output` wrote (.jsonl or .parquet).
        b: the output that `a` is compared with, of any of these kinds.

    Raises:
        InputError: a file is missing or damaged, or records lack ids, tokens or log-probabilities.
    """
    answers = [answers_of(side) for side in (a, b)]
    by_place = any(len({answer.name for answer in each}) < len(each) for each in answers)
    named = [{str(i) if by_place else answer.name: answer for i, answer in enumerate(each)} for each in answers]
    ours, theirs = named
    shared = [name for name in ours if name in theirs]
    alike = [name for name in shared if ours[name].asks_like(theirs[name])]
    return Comparison(
        sides=(_side(a), _side(b)),
        texts=tuple(_compare_texts(name, ours[name], theirs[name]) for name in alike),
        differing_prompts=tuple(name for name in shared if name not in set(alike)),
        only_a=tuple(name for name in ours if name not in theirs),
        only_b=tuple(name for name in theirs if name not in ours),
    )


def first_differing(a: Sequence[object], b: Sequence[object]) -> int | None:
    """The first place whose tokens or characters differ, or where one has ended; None if all are equal."""
    pairs = itertools.zip_longest(a, b)
    return next((place for place, (x, y) in enumerate(pairs) if x != y), None)


def _side(output: AnyOutput) -> str:
    """The path of a file; "" for others."""
    return str(output) if isinstance(output, str | Path) else ""


def _compare_texts(name: str, a: Answer, b: Answer) -> ComparedText:
    place = first_differing(a.token_ids, b.token_ids)
    before = slice(len(a.token_ids) if place is None else place)
    own = a.logprobs[before]
    other = b.logprobs[before]
    differs = ~same_bits(own, other)
    with np.errstate(invalid="ignore"):
        differences = np.where(differs, np.abs(np.subtract(own, other, dtype=np.float64)), 0.0)
    fork = None
    if place is not None:
        begun = first_differing(a.text, b.text)
        texts = ("", "") if begun is None else (a.text[begun:], b.text[begun:])
        fork = Fork(place, (_token(a, place), _token(b, place)), texts)
    lengths = len(a.token_ids), len(b.token_ids)
    return ComparedText(name, lengths, fork, differs, np.nan_to_num(differences, nan=np.inf, posinf=np.inf))


def _token(answer: Answer, place: int) -> int | None:
    return answer.token_ids[place] if place < len(answer.token_ids) else None


def _fork_rows(texts: Sequence[ComparedText]) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the table: the requests that fork, the earliest fork first."""
    forked = [(text.name, text.fork) for text in texts if text.fork is not None]
    for name, fork in sorted(forked, key=lambda pair: pair[1].place)[:MOST_SHOWN]:
        own, other = map(_goes_on, fork.token_ids, fork.texts)
        yield name, str(fork.place), own, other


def _goes_on(token: int | None, text: str) -> str:
    """A token and the text from it on."""
    shown = repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…") if text else ""
    return "ends" if token is None else f"{token} {shown}".rstrip()


def _some(names: Sequence[str]) -> str:
    """Number and first names; "" without names."""
    more = ", …" if len(names) > MOST_SHOWN else ""
    return f"{len(names):,}: {', '.join(names[:MOST_SHOWN])}{more}" if names else ""


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
