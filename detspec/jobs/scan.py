"""What a file of prompts holds, which may be any number of requests: it is read twice, and none of them is kept.

1. `scan` reads all of it: counts the lines, finds malformed ones and ids used twice, checks this shard's lines as requests.
2. `requests` reads this shard's lines once more and makes requests of them, one at a time, as the engine asks.

Lines are numbered from 0 without the blank ones, so that a line's number is the same in every shard.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from detspec.engine.engine import Engine
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.jobs.lines import parse_line, parse_request, reject_line
from detspec.jobs.prompts import Prompts
from detspec.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a reading of the whole file found.

    Attributes:
        num_lines: lines that are not blank, in the whole file.
        first: number of this shard's first line.
        counts: completions of each of this shard's lines; 0 if the line was rejected.
        num_prompt_tokens, longest_prompt: tokens of this shard's prompts, in all and of the longest.
        num_new_tokens, most_new_tokens: tokens that this shard's requests may at most generate, in all and in one sample.
        deterministic: whether some of this shard's requests are.
    """

    num_lines: int
    first: int
    counts: "array[int]"
    num_prompt_tokens: int
    longest_prompt: int
    num_new_tokens: int
    most_new_tokens: int
    deterministic: bool

    @property
    def num_requests(self) -> int:
        """Requests of this shard."""
        return len(self.counts) - self.num_rejected

    @property
    def num_rejected(self) -> int:
        """Lines of this shard that are no requests."""
        return self.counts.count(0)

    @property
    def num_completions(self) -> int:
        """Lines of output."""
        return sum(self.counts)


def scan(
    prompts: Prompts,
    engine: Engine,
    defaults: SamplingParams,
    *,
    shard: tuple[int, int] = (0, 1),
    reject: Callable[[bytes], object] | None = None,
) -> Scan:
    """Checks every line of this shard, and the ids of all shards.

    Args:
        prompts: the file.
        engine: what requests are checked for.
        defaults: sampling parameters that lines do not give.
        shard: index and number of shards; a shard is a contiguous block of the lines.
        reject: takes a line about each malformed line, instead of an exception.

    Raises:
        InputError: names the file, the line, what is wrong with it and what is accepted; or the file holds no requests.
    """
    num_lines, repeated = _check_ids(prompts, strict=reject is None)
    if not num_lines:
        raise InputError(
            f'{prompts.name} holds no requests: give one JSON object a line, such as {{"id": "a", "prompt": "def "}}'
        )
    first, end = block(num_lines, *shard)
    counts = array("I")
    prompt_tokens = longest_prompt = new_tokens = most_new_tokens = 0
    deterministic = False
    for number, place, raw in prompts.lines():
        if number >= end:
            break
        if number < first:
            continue
        try:
            if number in repeated:
                raise InputError(repeated[number])
            request = parse_request(raw, engine.model, engine.config, defaults)
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
        deterministic |= request.sampling.deterministic
    return Scan(num_lines, first, counts, prompt_tokens, longest_prompt, new_tokens, most_new_tokens, deterministic)


def requests(
    prompts: Prompts, engine: Engine, defaults: SamplingParams, found: Scan, *, is_done: Callable[[int], bool] = lambda _: False
) -> Iterator[tuple[int, Request]]:
    """Number and request of each sound line of the shard that is not done, made when asked for."""
    for number, _, raw in prompts.lines():
        if number >= found.first + len(found.counts):
            break
        if number >= found.first and found.counts[number - found.first] and not is_done(number):
            yield number, parse_request(raw, engine.model, engine.config, defaults)


def block(num_lines: int, index: int, count: int) -> tuple[int, int]:
    """First line of shard `index` of `count`, and the first after it; 10 lines in 4 shards: 0..2, 2..5, 5..7, 7..10."""
    return index * num_lines // count, (index + 1) * num_lines // count


def repeated_hashes(hashes: "array[int]") -> set[int]:
    """The values that occur more than once."""
    ordered = np.sort(np.frombuffer(hashes, np.uint64)) if hashes else np.empty(0, np.uint64)
    return set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())


def hash_id(id: str) -> int:
    """64 bits in place of an id."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "big")


def _check_ids(prompts: Prompts, *, strict: bool) -> tuple[int, dict[int, str]]:
    """How many lines there are, and what is wrong with those whose id was used before, by number.

    `strict` raises at the first malformed line, in whatever shard.
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
    """Lines whose id was used before: two ids may share a hash, so ids of suspicious hashes are compared themselves."""
    place_of: dict[str, int] = {}
    for number, place, raw in lines:
        try:
            id = parse_line(raw)["id"]
        except InputError:
            continue
        if hash_id(id) in suspects and place_of.setdefault(id, place) != place:
            yield number, place, f"id {id!r} was already used on line {place_of[id]}"
