"""Reads a file of prompts of any size once: its lines are parsed, checked and tokenized once, before anything is generated.

`read_lines` counts lines, finds malformed lines and repeated ids in the whole file, and checks this shard's requests. These
wait in a `Spool` until the engine asks for them: few in memory, many in a temporary file. Writing a line there and reading it
back takes a tenth of the time of tokenizing it again, or up to a third where lines are short.
A file in which an id occurs twice is read once more, so that the
errors of its lines come in their order.

Non-blank lines are numbered from 0 over the whole file, so a line has the same number in every shard.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import pickle
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from detspec.engine.engine import Engine
from detspec.engine.policy import Needs
from detspec.errors import InputError
from detspec.jobs.batch_lines import KEY as BATCH_KEY
from detspec.jobs.batch_lines import BatchReader
from detspec.jobs.lines import PROMPT_KEYS, CheckedLine, LineFormat, LineReader, reject_line
from detspec.jobs.prompts import MAX_LINE_BYTES, UNSHARDED, JobSpec, PromptLines
from detspec.read_json import parse_json

MOST_PEEKED = 1000  # lines that may tell which format a file has
MOST_BYTES = 16 << 20  # bytes of a spool in memory


@dataclasses.dataclass(frozen=True)
class Scan:
    """Counts and facts of the lines of a job."""

    num_lines: int  # non-blank lines in the whole file
    first: int  # number of this shard's first line
    counts: "array[int]"  # completions of each of this shard's lines; 0 if the line was rejected
    num_prompt_tokens: int  # total number of prompt tokens in this shard
    longest_prompt: int  # number of tokens of the longest prompt
    num_new_tokens: int  # upper bound of the tokens that this shard generates
    most_new_tokens: int  # upper bound of the tokens of one sample
    needs: Needs  # programs that all requests of this shard need together
    repeated: dict[int, str]  # errors for lines of the whole file whose id was used before, by number
    num_bad: int = 0  # OpenAI's lines that an error answers

    @property
    def num_requests(self) -> int:
        """Number of this shard's requests."""
        return len(self.counts) - self.num_rejected

    @property
    def num_rejected(self) -> int:
        """Number of this shard's lines that are malformed."""
        return self.counts.count(0)

    @property
    def num_completions(self) -> int:
        """Number of lines that this shard's output has."""
        return sum(self.counts)


class Spool:
    """Values in the order in which they were added: few in memory, many in a file without a name; a context manager.

    Only what this process wrote is ever unpickled.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """An empty one. The file lies in `folder`, by default in that of temporary files."""
        self._file = tempfile.SpooledTemporaryFile(MOST_BYTES, dir=None if folder is None else str(folder))  # noqa: SIM115
        self._number = 0

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, value: Any) -> None:
        """Adds a value at the end, before any is read."""
        pickle.dump(value, self._file)
        self._number += 1

    def clear(self) -> None:
        """Drops all values."""
        self._file.seek(0)
        self._file.truncate()
        self._number = 0

    def __iter__(self) -> Iterator[Any]:
        self._file.seek(0)
        return (pickle.load(self._file) for _ in range(self._number))


@dataclasses.dataclass(frozen=True)
class JobLines:
    """The lines of a job after all were read.

    Attributes:
        found: their counts.
        reader: their format.
        asked: sound lines of this shard, each an `CheckedLine`.
        rejects: for each malformed line of this shard a line of `*.rejects.jsonl`.
    """

    found: Scan
    reader: LineFormat
    asked: Spool
    rejects: Spool

    def todo(self, is_done: Callable[[int], bool] = lambda _: False) -> Iterator[CheckedLine]:
        """Yields each sound line for whose number `is_done` is false."""
        return (asked for asked in self.asked if not is_done(asked.number))


@contextlib.contextmanager
def read_lines(engine: Engine, spec: JobSpec, folder: Path | None = None, *, keep: bool = True) -> Iterator[JobLines]:
    """Checks the ids of the whole file, and this shard's lines as requests to `engine`.

    `folder` is for temporary files. Without `keep`, sound lines are only counted.

    Raises `InputError` if a line is malformed and the job does not reject such (the message names it, and what is accepted), or
    the file holds no requests.
    """
    prompts = spec.prompts
    reader = make_reader(engine, spec, {})
    with Spool(folder) as asked, Spool(folder) as rejects:
        keep_fn: Callable[[CheckedLine], object] = asked.add if keep else lambda _: None
        found, hashes = _check_lines(reader, spec, keep_fn, rejects.add)
        if not found.num_lines:
            raise InputError(
                f'{prompts.name} holds no requests: give one JSON object a line, such as {{"id": "a", "prompt": "def "}}'
            )
        if (suspects := repeated_hashes(hashes)) and (repeated := _find_repeated(reader, spec, suspects)):
            asked.clear()
            rejects.clear()
            reader = make_reader(engine, spec, repeated)
            found, _ = _check_lines(reader, spec, keep_fn, rejects.add)
            found = dataclasses.replace(found, repeated=repeated)
        yield JobLines(found, reader, asked, rejects)


def make_reader(engine: Engine, spec: JobSpec, repeated: Mapping[int, str]) -> LineFormat:
    """The reader of the job's lines; `repeated` are errors for those whose id was used before."""
    return (BatchReader if spec.is_openai else LineReader)(engine, spec, repeated)


def is_openai(prompts: PromptLines) -> bool:
    """Whether the lines are OpenAI's: the first that is a JSON object with an id or a prompt has their id."""
    for _, raw in itertools.islice(prompts.lines(), MOST_PEEKED):
        with contextlib.suppress(InputError):
            line = parse_json(raw) if len(raw) <= MAX_LINE_BYTES else None
            if isinstance(line, dict) and any(key in line for key in (BATCH_KEY, "id", *PROMPT_KEYS)):
                return BATCH_KEY in line
    return False


def block(num_lines: int, index: int, count: int) -> tuple[int, int]:
    """First line of shard `index` of `count`, and the first line after it; 10 lines in 4 shards: 0..2, 2..5, 5..7, 7..10."""
    return index * num_lines // count, (index + 1) * num_lines // count


def repeated_hashes(hashes: "array[int]") -> set[int]:
    """The hashes that occur more than once."""
    ordered = np.sort(np.frombuffer(hashes, np.uint64)) if hashes else np.empty(0, np.uint64)
    return set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())


def hash_id(id: str) -> int:
    """A 64-bit hash of an id."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "big")


def _check_lines(
    reader: LineFormat, spec: JobSpec, keep: Callable[[CheckedLine], object], reject: Callable[[bytes], object]
) -> tuple[Scan, "array[int]"]:
    """Reads all lines, and hands over the sound and the malformed ones of the shard; returns counts, and hashes of all ids."""
    prompts = spec.prompts
    first = 0
    end = sys.maxsize
    if spec.shard != UNSHARDED:
        first, end = block(sum(1 for _ in prompts.marks(1)), *spec.shard)
    hashes = array("Q")
    counts = array("I")
    num_lines = prompt_tokens = longest_prompt = new_tokens = most_new_tokens = num_bad = 0
    needs = Needs(deterministic=False, ordinary=False, processing=False)

    def note_id(id: str) -> None:
        hashes.append(hash_id(id))

    for mark, raw in prompts.lines():
        num_lines += 1
        is_ours = first <= mark.number < end
        try:
            if not is_ours:
                note_id(reader.id_of(mark.number, raw))
                continue
            asked = reader.asked(mark.number, raw, note_id)
        except InputError as error:
            why = f"{error}{prompts.advice(raw) if is_ours else ''}"
            if spec.is_strict:
                raise InputError(f"{prompts.name} line {mark.place}: {why}") from error
            if is_ours:
                reject(reject_line(mark.place, why, raw))
                counts.append(0)
            continue
        keep(asked)
        counts.append(asked.num_outputs)
        num_bad += not asked.requests
        for request in asked.requests:
            prompt_len = len(request.prompt_token_ids) + len(request.given_token_ids)
            prompt_tokens += prompt_len
            longest_prompt = max(longest_prompt, prompt_len)
            if request.given_token_ids:
                continue  # it is read, and no step runs for it
            new_tokens += request.sampling.n * request.sampling.max_tokens
            most_new_tokens = max(most_new_tokens, request.sampling.max_tokens)
            needs |= Needs.of([request.sampling])
    totals = (prompt_tokens, longest_prompt, new_tokens, most_new_tokens)
    return Scan(num_lines, first, counts, *totals, needs, {}, num_bad), hashes


def _find_repeated(reader: LineFormat, spec: JobSpec, suspects: set[int]) -> dict[int, str]:
    """Errors for lines whose id was used before, by number. Raises the first one if a malformed line ends the job.

    Two ids may share a hash, so ids with a hash in `suspects` are compared themselves.
    """
    place_of: dict[str, int] = {}
    repeated: dict[int, str] = {}
    for mark, raw in spec.prompts.lines():
        try:
            id = reader.id_of(mark.number, raw)
        except InputError:
            continue
        if hash_id(id) in suspects and place_of.setdefault(id, mark.place) != mark.place:
            repeated[mark.number] = f"id {id!r} was already used on line {place_of[id]}"
            if spec.is_strict:
                raise InputError(f"{spec.prompts.name} line {mark.place}: {repeated[mark.number]}")
    return repeated
