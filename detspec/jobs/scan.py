"""Reads a file of prompts of any size twice, without keeping its requests in memory.

1. `scan` reads the whole file: it counts lines, finds malformed lines and repeated ids, and checks this shard's requests.
2. `requests` reads this shard's lines again and makes one request at a time, when the engine asks for it.

Non-blank lines are numbered from 0 over the whole file, so a line has the same number in every shard.
"""

import contextlib
import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from detspec.engine.engine_group import AnyEngine
from detspec.engine.policy import Needs
from detspec.errors import InputError
from detspec.jobs.asked import Asked, AskedRequest
from detspec.jobs.batch_lines import KEY as BATCH_KEY
from detspec.jobs.batch_lines import BatchReader, parse_id
from detspec.jobs.lines import metadata_of, parse_line, parse_request, reject_line
from detspec.jobs.prompts import MAX_LINE_BYTES, JobSpec, PromptLines
from detspec.read_json import parse_json

MOST_GUESSED = 1000  # lines that may tell which format a file has


@dataclasses.dataclass(frozen=True)
class Scan:
    """What `scan` found."""

    num_lines: int  # non-blank lines in the whole file
    first: int  # number of this shard's first line
    counts: "array[int]"  # completions of each of this shard's lines; 0 if the line was rejected
    num_prompt_tokens: int  # total number of prompt tokens in this shard
    longest_prompt: int  # number of tokens of the longest prompt
    num_new_tokens: int  # upper bound of the tokens that this shard generates
    most_new_tokens: int  # upper bound of the tokens of one sample
    needs: Needs  # what all requests of this shard together need of programs
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


def scan(engine: AnyEngine, spec: JobSpec, *, reject: Callable[[bytes], object] | None = None) -> Scan:
    """Checks the ids of the whole file, and this shard's lines as requests to `engine`; `spec.on_error` is not read.

    `reject` is called with a line of `*.rejects.jsonl` for each malformed line; None raises instead.

    Raises `InputError` if a line is malformed (the message names it, and what is accepted), or the file holds no requests.
    """
    prompts = spec.prompts
    num_lines, repeated = _check_ids(spec, strict=reject is None and not spec.is_openai)
    if not num_lines:
        raise InputError(
            f'{prompts.name} holds no requests: give one JSON object a line, such as {{"id": "a", "prompt": "def "}}'
        )
    first, end = block(num_lines, *spec.shard)
    counts = array("I")
    prompt_tokens = longest_prompt = new_tokens = most_new_tokens = 0
    num_bad = 0
    needs = Needs(deterministic=False, ordinary=False, processing=False)
    reader = make_reader(engine, spec, repeated)
    for number, place, raw in prompts.lines():
        if number >= end:
            break
        if number < first:
            continue
        try:
            asked = reader.asked(number, raw)
        except InputError as error:
            why = f"{error}{prompts.advice(raw)}"
            if reject is None:
                raise InputError(f"{prompts.name} line {place}: {why}") from error
            reject(reject_line(place, why, raw))
            counts.append(0)
            continue
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
    return Scan(num_lines, first, counts, *totals, needs, repeated, num_bad)


def requests(
    engine: AnyEngine, spec: JobSpec, found: Scan, *, is_done: Callable[[int], bool] = lambda _: False
) -> Iterator[Asked]:
    """Lazily yields each valid line of the shard for which `is_done(number)` is false."""
    reader = make_reader(engine, spec, found.repeated)
    for number, _, raw in spec.prompts.lines():
        if number >= found.first + len(found.counts):
            break
        if number >= found.first and found.counts[number - found.first] and not is_done(number):
            yield reader.asked(number, raw)


class Reader(Protocol):
    """Makes of each line of a job what it asks an engine for."""

    def asked(self, number: int, raw: bytes) -> Asked:
        """Line `number` of the input. Raises `InputError` if it is malformed and no error can answer it."""


class RequestReader:
    """A reader of our own lines."""

    def __init__(self, engine: AnyEngine, spec: JobSpec, repeated: Mapping[int, str]) -> None:
        self._engine = engine
        self._defaults = spec.defaults
        self._now = spec.now
        self._repeated = repeated

    def asked(self, number: int, raw: bytes) -> Asked:
        """Line `number`."""
        if number in self._repeated:
            raise InputError(self._repeated[number])
        request = parse_request(raw, self._engine.model, self._engine.config, self._defaults, self._now)
        return AskedRequest(number, request, metadata_of(raw))


def make_reader(engine: AnyEngine, spec: JobSpec, repeated: Mapping[int, str]) -> Reader:
    """The reader of the job's lines; `repeated` are errors for those whose id was used before."""
    return (BatchReader if spec.is_openai else RequestReader)(engine, spec, repeated)


def is_openai(prompts: PromptLines) -> bool:
    """Whether the lines are OpenAI's: the first that is a JSON object with one of the two ids has theirs."""
    for number, _, raw in prompts.lines():
        if number == MOST_GUESSED:
            break
        with contextlib.suppress(InputError):
            line = parse_json(raw) if len(raw) <= MAX_LINE_BYTES else None
            if isinstance(line, dict) and (BATCH_KEY in line or "id" in line):
                return BATCH_KEY in line
    return False


def id_of(raw: bytes, spec: JobSpec) -> str:
    """The id of a line; `InputError` if it has none."""
    return str(parse_id(raw)[BATCH_KEY] if spec.is_openai else parse_line(raw)["id"])


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


def _check_ids(spec: JobSpec, *, strict: bool) -> tuple[int, dict[int, str]]:
    """The number of lines, and an error message for each line number whose id was used before.

    `strict` raises at the first malformed line of any shard.
    """
    prompts = spec.prompts
    hashes = array("Q")
    num_lines = 0
    for _, place, raw in prompts.lines():
        num_lines += 1
        try:
            hashes.append(hash_id(id_of(raw, spec)))
        except InputError as error:
            if strict:
                raise InputError(f"{prompts.name} line {place}: {error}") from error
    repeated: dict[int, str] = {}
    if suspects := repeated_hashes(hashes):
        for number, place, why in _find_repeated(spec, suspects):
            if strict:
                raise InputError(f"{prompts.name} line {place}: {why}")
            repeated[number] = why
    return num_lines, repeated


def _find_repeated(spec: JobSpec, suspects: set[int]) -> Iterator[tuple[int, int, str]]:
    """Lines whose id was used before. Two ids may share a hash, so ids with a hash in `suspects` are compared themselves."""
    place_of: dict[str, int] = {}
    for number, place, raw in spec.prompts.lines():
        try:
            id = id_of(raw, spec)
        except InputError:
            continue
        if hash_id(id) in suspects and place_of.setdefault(id, place) != place:
            yield number, place, f"id {id!r} was already used on line {place_of[id]}"
