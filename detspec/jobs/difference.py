"""Findings of an audit: the first place where each record differs from the canonical completion, and the report of them all."""

import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.bits import first_difference
from detspec.engine.request import Replay, Request, completion_digest
from detspec.engine.sequence import asked_logprobs, decode_thought, ending_of
from detspec.jobs.lines import LOGPROB_KEYS, as_json, thought_line
from detspec.jobs.records import Record, Recorded

MOST_SHOWN = 20
# Fields of a body that are compared before the others: those from which the others follow.
FIRST = ("response", "body", "choices", "token_ids", "logprobs", "token_logprobs", "content")
NOTHING = object()  # in place of a value that is missing
MOST_CHARS = 80  # characters of a value that is named


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where a record differs from the canonical completion."""

    record: str  # id of the record, with the sample's number if the request asks for several: `a[2]`
    # index in `token_ids`, where 0 is the first token after the prompt; None for facts about the whole record
    position: int | None
    what: str  # the recorded and the canonical value


@dataclasses.dataclass
class AuditReport:
    """Counts of an audit, and the records that differ."""

    num_records: int = 0  # deterministic records
    num_failed: int = 0  # records of requests that failed, which hold no tokens: nothing is replayed
    num_ordinary: int = 0  # records of ordinary requests, which promise nothing
    num_ordinary_reproduced: int = 0  # ordinary records that equal the canonical completion nevertheless
    num_tokens: int = 0  # new tokens of all records
    differences: list[Difference] = dataclasses.field(default_factory=list)  # one for each deterministic record that differs
    # differences between this machine's fingerprint and the manifest's, a sentence each
    machine: list[str] = dataclasses.field(default_factory=list)
    replay_s: float = 0.0  # seconds spent on replaying
    num_other_weights: int = 0  # samples in a server's log that other weights gave, which were not replayed

    @property
    def reproduced(self) -> bool:
        """Whether every deterministic record equals the canonical completion."""
        return not self.differences

    def count(self, found: Difference | None, num_tokens: int, *, deterministic: bool) -> None:
        """Counts a record that was compared, of an ordinary request unless `deterministic`."""
        self.num_tokens += num_tokens
        if deterministic:
            self.num_records += 1
            self.differences += [] if found is None else [found]
        else:
            self.num_ordinary += 1
            self.num_ordinary_reproduced += found is None

    def add(self, other: "AuditReport") -> None:
        """Counts what another report found, too."""
        self.num_records += other.num_records
        self.num_failed += other.num_failed
        self.num_ordinary += other.num_ordinary
        self.num_ordinary_reproduced += other.num_ordinary_reproduced
        self.num_tokens += other.num_tokens
        self.differences += other.differences
        self.machine += [line for line in other.machine if line not in self.machine]
        self.replay_s += other.replay_s

    def table(self) -> str:
        """The report as text."""
        lines = [f"another machine: {line}" for line in self.machine]
        lines += [
            f"records      {self.num_records:8}",
            f"  reproduced {self.num_records - len(self.differences):8}",
            f"  differing  {len(self.differences):8}",
        ]
        if self.num_failed:
            lines.append(f"failed       {self.num_failed:8}   these requests hold no tokens, so there is nothing to replay")
        if self.num_ordinary:
            equal = f"{self.num_ordinary_reproduced} of them equal the canonical bits"
            lines.append(f"ordinary     {self.num_ordinary:8}   not promised; {equal}")
        if self.num_other_weights:
            lines.append(f"other weights{self.num_other_weights:7}   not replayed")
        if self.differences:
            lines += ["", "first difference of each record; tokens are counted from 0 after the prompt"]
            for found in self.differences[:MOST_SHOWN]:
                where = "record" if found.position is None else f"token {found.position}"
                lines.append(f"  {found.record:24} {where:10} {found.what}")
            if len(self.differences) > MOST_SHOWN:
                lines.append(f"  and {len(self.differences) - MOST_SHOWN} more")
        return "\n".join(lines)


def difference_of(recorded: Recorded, replay: Replay, model: Model, context: str) -> Difference | None:
    """Finds the first difference between a record and the canonical completion of its request; None if they are equal.

    `replay` is of the record's tokens, `context` the digest of everything else that the bits depend on.
    """
    record, request, metadata = recorded
    if request.given_token_ids:
        replay = replay.of_given(request.given_token_ids)
    if other := _first_other_thought(record, replay, model):
        return other
    tokens = record.token_ids
    length, finish_reason, text = ending_of(request, tokens, replay.targets, replay.logprobs, model)
    shared = min(len(tokens), len(record.logprobs), length)
    targets = replay.targets[:shared]
    logprobs = replay.logprobs[:shared]
    # Compared as float64, so a decimal that is not exactly a float32 differs, too. What is not finite is null in a record.
    given = np.asarray(tokens[:shared], np.int32), record.logprobs[:shared]
    expected = targets, np.where(np.isfinite(logprobs), logprobs, np.float32(np.nan)).astype(np.float64)
    if place := first_difference(list(zip(given, expected, strict=True))):
        at = place[0]
        if targets[at] != tokens[at]:
            return Difference(record.name, at, f"token: recorded {tokens[at]}, canonical {targets[at]}")
        what = f"log-probability: recorded {float(record.logprobs[at])!r}, canonical {float(logprobs[at])!r}"
        return Difference(record.name, at, what)
    if len(tokens) > length:
        what = f"token: recorded {tokens[length]}, but the canonical text ends before it ({finish_reason})"
        return Difference(record.name, length, what)
    if finish_reason is None:
        what = f"token: the record ends, but the canonical text goes on with {replay.targets[length]}"
        return Difference(record.name, length, what)
    if len(record.logprobs) != length:
        return Difference(record.name, shared, f"log-probability: recorded {len(record.logprobs)} for {length} tokens")
    facts = {
        "finish_reason": (record.finish_reason, finish_reason),
        "logprobs_mode": (record.logprobs_mode, request.sampling.logprobs_mode),
        "prompt_len": (record.prompt_len, len(request.prompt_token_ids)),
        "text": (record.text, text),
        "digest": (record.digest, completion_digest(request, tokens, logprobs, replay.thoughts, context)),
    }
    for name, (found, canonical) in facts.items():
        if found != canonical:
            return Difference(record.name, None, f"{name}: recorded {found!r}, canonical {canonical!r}")
    return _first_other_asked(record, request, replay) or metadata_difference(record, metadata)


def metadata_difference(record: Record, metadata: dict[str, Any] | None) -> Difference | None:
    """Finds where a record's metadata part from those of its line of input; None if they are equal."""
    found, canonical = (NOTHING if value is None else value for value in (record.metadata, metadata))
    what = first_other(found, canonical, "metadata")
    return None if what is None else Difference(record.name, None, what)


def _first_other_thought(record: Record, replay: Replay, model: Model) -> Difference | None:
    """Finds the first thought about the prompt that is not the recorded one."""
    canonical = [thought_line(decode_thought(token_ids, model)) for token_ids in replay.thoughts]
    if found := _first_unlike(record.thoughts, canonical):
        chunk, what = found
        return Difference(record.name, None, f"thought after chunk {chunk}: {what}")
    return None


def _first_other_asked(record: Record, request: Request, replay: Replay) -> Difference | None:
    """Finds where log-probabilities that are asked for besides those of the new tokens first part from the recorded ones."""
    num_tokens = len(request.prompt_token_ids) + len(record.token_ids)
    for key, canonical in zip(LOGPROB_KEYS, asked_logprobs(request, num_tokens, replay.likeliest), strict=True):
        if found := _first_unlike(record.asked.get(key, ()), as_json(canonical)):
            position, what = found
            if key == "top_logprobs":
                return Difference(record.name, position, f"{key}: {what}")
            return Difference(record.name, None, f"{key}: token {position} of the prompt: {what}")
    return None


def _first_unlike(recorded: Iterable[Any], canonical: Iterable[Any]) -> tuple[int, str] | None:
    """The first place where two lists differ as JSON, in which -0.0 is not 0.0, and what stands there."""
    pairs = itertools.zip_longest(map(json.dumps, recorded), map(json.dumps, canonical), fillvalue="nothing")
    return next(((place, f"recorded {a}, canonical {b}") for place, (a, b) in enumerate(pairs) if a != b), None)


def first_other(recorded: Any, canonical: Any, name: str = "") -> str | None:
    """Says in which field two JSON values first differ, `choices[0].text: recorded "a", canonical "b"`; None if in none."""
    if isinstance(recorded, dict) and isinstance(canonical, dict):
        keys = sorted(dict.fromkeys((*canonical, *recorded)), key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))
        pairs = [(f"{name}.{key}".lstrip("."), recorded.get(key, NOTHING), canonical.get(key, NOTHING)) for key in keys]
    elif isinstance(recorded, list) and isinstance(canonical, list):
        length = max(len(recorded), len(canonical))
        padded = [[*values, *[NOTHING] * (length - len(values))] for values in (recorded, canonical)]
        pairs = [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(*padded, strict=True))]
    else:
        # As text, in which -0.0 is not 0.0, nor 1 true.
        texts = ["nothing" if value is NOTHING else json.dumps(value) for value in (recorded, canonical)]
        shown = [text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}..." for text in texts]
        name = name.removeprefix("response.body.")
        return None if texts[0] == texts[1] else f"{name}: recorded {shown[0]}, canonical {shown[1]}"
    return next((found for key, a, b in pairs if (found := first_other(a, b, key)) is not None), None)
