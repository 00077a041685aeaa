"""Reads a file of prompts of any size twice, without keeping its requests in memory.

1. `scan` reads the whole file: it counts lines, finds malformed lines and repeated ids, and checks this shard's requests.
2. `requests` reads this shard's lines again and makes one request at a time, when the engine asks for it.

Non-blank lines are numbered from 0 over the whole file, so a line has the same number in every shard.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from detspec.engine.engine_group import AnyEngine
from detspec.engine.policy import Needs
from detspec.errors import InputError
from detspec.jobs.asked import Asked, AskedRequest
from detspec.jobs.lines import parse_line, parse_request, reject_line
from detspec.jobs.prompts import JobSpec, Prompts


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
    num_lines, repeated = _check_ids(prompts, strict=reject is None)
    if not num_lines:
        raise InputError(
            f'{prompts.name} holds no requests: give one JSON object a line, such as {{"id": "a", "prompt": "def "}}'
        )
    first, end = block(num_lines, *spec.shard)
    counts = array("I")
    prompt_tokens = longest_prompt = new_tokens = most_new_tokens = 0
    needs = Needs(deterministic=False, ordinary=False, processing=False)
    for number, place, raw in prompts.lines():
        if number >= end:
            break
        if number < first:
            continue
        try:
            if number in repeated:
                raise InputError(repeated[number])
            request = parse_request(raw, engine.model, engine.config, spec.defaults)
        except InputError as error:
            if reject is None:
                raise InputError(f"{prompts.name} line {place}: {error}") from error
            reject(reject_line(place, str(error), raw))
            counts.append(0)
            continue
        counts.append(request.sampling.n)
        prompt_tokens += len(request.prompt_token_ids)
        longest_prompt = max(longest_prompt, len(request.prompt_token_ids))
        new_tokens += request.sampling.n * request.sampling.max_tokens
        most_new_tokens = max(most_new_tokens, request.sampling.max_tokens)
        needs |= Needs.of([request.sampling])
    return Scan(num_lines, first, counts, prompt_tokens, longest_prompt, new_tokens, most_new_tokens, needs)


def requests(
    engine: AnyEngine, spec: JobSpec, found: Scan, *, is_done: Callable[[int], bool] = lambda _: False
) -> Iterator[Asked]:
    """Lazily yields each valid line of the shard for which `is_done(number)` is false."""
    for number, _, raw in spec.prompts.lines():
        if number >= found.first + len(found.counts):
            break
        if number >= found.first and found.counts[number - found.first] and not is_done(number):
            yield parse_asked(number, raw, engine, spec)


def parse_asked(number: int, raw: bytes, engine: AnyEngine, spec: JobSpec) -> Asked:
    """Line `number` of the input, which must be valid."""
    return AskedRequest(number, parse_request(raw, engine.model, engine.config, spec.defaults))


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


def _check_ids(prompts: Prompts, *, strict: bool) -> tuple[int, dict[int, str]]:
    """The number of lines, and an error message for each line number whose id was used before.

    `strict` raises at the first malformed line of any shard.
    """
    hashes = array("Q")
    num_lines = 0
    for _, place, raw in prompts.lines():
        num_lines += 1
        try:
            hashes.append(hash_id(parse_line(raw)["id"]))
        except InputError as error:
            if strict:
                raise InputError(f"{prompts.name} line {place}: {error}") from error
    repeated: dict[int, str] = {}
    if suspects := repeated_hashes(hashes):
        for number, place, why in _find_repeated(prompts.lines(), suspects):
            if strict:
                raise InputError(f"{prompts.name} line {place}: {why}")
            repeated[number] = why
    return num_lines, repeated


def _find_repeated(lines: Iterable[tuple[int, int, bytes]], suspects: set[int]) -> Iterator[tuple[int, int, str]]:
    """Lines whose id was used before. Two ids may share a hash, so ids with a hash in `suspects` are compared themselves."""
    place_of: dict[str, int] = {}
    for number, place, raw in lines:
        try:
            id = parse_line(raw)["id"]
        except InputError:
            continue
        if hash_id(id) in suspects and place_of.setdefault(id, place) != place:
            yield number, place, f"id {id!r} was already used on line {place_of[id]}"
