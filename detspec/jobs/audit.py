"""Audit of a job's output: every record is replayed through the canonical pass and compared bit for bit.

1. The manifest next to the records names their model, schedule and sampling; the file of prompts holds the requests.
2. The replayer reads the recorded tokens, teacher-forced. At each position it gives the canonical token.
3. `difference_of` derives the canonical completion, and names the first place where the record differs from it.

Up to the first difference the record is the canonical text, so nothing has to be generated. An aborted record holds fewer
tokens than the canonical completion, and differs where it ends.
"""

import dataclasses
import itertools
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.bits import first_difference
from detspec.engine.ending import decode_thought
from detspec.engine.replayer import Replay, Replayer
from detspec.engine.request import Request, completion_digest
from detspec.engine.sequence import asked_logprobs
from detspec.engine.text import find_stop
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.jobs.files import STDIO
from detspec.jobs.lines import LOGPROB_KEYS, as_json, thought_line
from detspec.jobs.manifest import differences, text_facts
from detspec.jobs.records import Origin, PromptsById, Record, read_origin, read_records
from detspec.progress import Progress
from detspec.sampling_params import all_stop_ids

MOST_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where a record differs from the canonical completion."""

    record: str  # id of the record, with the sample's number if the request asks for several: `a[2]`
    # index in `token_ids`, where 0 is the first token after the prompt; None for facts about the whole record
    position: int | None
    what: str  # the recorded and the canonical value


@dataclasses.dataclass
class AuditReport:
    """What an audit found."""

    num_records: int = 0  # deterministic records
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

    def add(self, other: "AuditReport") -> None:
        """Counts what another report found, too."""
        self.num_records += other.num_records
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


def run_audit(model: Model, records: Path, *, prompts: Path | None = None, max_requests: int = 32) -> AuditReport:
    """Replays the output `records` of a job, which has its manifest in the same folder, `max_requests` of them together.

    `prompts` are the job's file of prompts; by default the one that the manifest names.

    Raises `InputError` if files are missing or malformed, a record has no prompt, or `model` is not the manifest's.
    """
    origin = read_origin(records)
    check_model(origin, model)
    if prompts is None:
        if origin.source == STDIO:
            raise InputError("the job read its prompts from the standard input: name their file with --prompts")
        prompts = Path(origin.source)
    columns = {"column": origin.column, "id_column": origin.id_column}
    with PromptsById(prompts, origin.sha256, **columns) as asked, Progress(_count_lines(records), "records") as progress:
        requests = _asked(model, records, asked, origin)
        report = audit_records(model, origin, requests, max_requests=max_requests, progress=progress)
    if not report.num_records + report.num_ordinary:
        raise InputError(f"{records} holds no records")
    return report


def audit_records(
    model: Model, origin: Origin, records: Iterable[tuple[Record, Request]], *, max_requests: int, progress: Progress
) -> AuditReport:
    """Replays `records` of `origin`, each with its request of one sample, and compares them; see `run_audit`."""
    replayer = Replayer(model, dataclasses.replace(origin.engine, max_requests=max_requests, num_pages=None))
    report = AuditReport(machine=machine_differences(origin, replayer.mesh))
    waiting: deque[tuple[Record, Request]] = deque()
    progress.stage("compiling and certifying")
    replayer.prepare()
    progress.stage("replaying")
    began = time.perf_counter()
    for replay in replayer.run(_to_replay(records, waiting)):
        record, request = waiting.popleft()
        found = difference_of(record, request, replay, model, origin.digest)
        report.num_tokens += len(record.token_ids)
        if not request.sampling.deterministic:
            report.num_ordinary += 1
            report.num_ordinary_reproduced += found is None
        else:
            report.num_records += 1
            report.differences += [] if found is None else [found]
        progress.finished()
        progress.segment(len(record.token_ids), len(waiting))
    report.replay_s = time.perf_counter() - began
    return report


def check_model(origin: Origin, model: Model) -> None:
    """Raises `InputError` unless `model` is the one that the records come from."""
    if origin.fingerprint["model"] != model.digest:
        raise InputError(
            f"the records come from the model with digest {origin.fingerprint['model']}, but this one's is {model.digest}: "
            "name the right folder with --model"
        )
    if parts := differences(origin.text, text_facts(model), them="the records' model", us="this one"):
        raise InputError(f"this model maps text and tokens differently from the records' model: {'; '.join(parts)}")


def machine_differences(origin: Origin, mesh: str) -> list[str]:
    """The differences between this machine's fingerprint, with its `mesh`, and the manifest's, a sentence each."""
    return [
        f"{name} is {here!r}, the records' was {origin.fingerprint.get(name)!r}"
        for name, here in {**fingerprint(), "mesh": mesh}.items()
        if origin.fingerprint.get(name) != here
    ]


def _to_replay(
    records: Iterable[tuple[Record, Request]], waiting: deque[tuple[Record, Request]]
) -> Iterator[tuple[Request, Sequence[int]]]:
    """Yields requests and tokens for the replayer; appends `records` to `waiting`."""
    for record, request in records:
        waiting.append((record, request))
        yield request, record.token_ids[: request.sampling.max_tokens]


def _asked(model: Model, records: Path, prompts: PromptsById, origin: Origin) -> Iterator[tuple[Record, Request]]:
    """The records of a job, each with the sample that it answers."""
    seen: set[str] = set()
    for record in read_records(records, model.cfg.vocab_size):
        if record.name in seen:
            raise InputError(f"{records}: the record {record.name!r} occurs twice")
        seen.add(record.name)
        yield record, sample_of(prompts.request(record.id, model, origin.engine, origin.sampling), record)


def sample_of(request: Request, record: Record) -> Request:
    """The sample of `request` that the index of `record` names; `InputError` if there is none."""
    n = request.sampling.n
    numbers = (None,) if n == 1 else range(n)
    if record.index not in numbers:
        known = "no index" if n == 1 else f"an index in 0 .. {n - 1}"
        raise InputError(f"the record {record.id!r} has index {record.index}, but its request has n = {n}: accepted is {known}")
    return next(itertools.islice(request.samples(), record.index or 0, None))


def difference_of(record: Record, request: Request, replay: Replay, model: Model, context: str) -> Difference | None:
    """The first difference between `record` and the canonical completion of `request`, one sample; None if they are equal.

    `context` is the digest of everything else that the bits depend on.
    """
    if other := _first_other_thought(record, replay, model):
        return other
    length, finish_reason, text = _ending(record, request, replay, model)
    recorded = record.token_ids
    shared = min(len(recorded), len(record.logprobs), length)
    targets = replay.targets[:shared]
    logprobs = replay.logprobs[:shared]
    # Compared as float64, so a decimal that is not exactly a float32 differs, too.
    given = np.asarray(recorded[:shared], np.int32), record.logprobs[:shared]
    if place := first_difference(list(zip(given, (targets, logprobs.astype(np.float64)), strict=True))):
        at = place[0]
        if targets[at] != recorded[at]:
            return Difference(record.name, at, f"token: recorded {recorded[at]}, canonical {targets[at]}")
        what = f"log-probability: recorded {float(record.logprobs[at])!r}, canonical {float(logprobs[at])!r}"
        return Difference(record.name, at, what)
    if len(recorded) > length:
        what = f"token: recorded {recorded[length]}, but the canonical text ends before it ({finish_reason})"
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
        "digest": (record.digest, completion_digest(request, recorded, logprobs, replay.thoughts, context)),
    }
    for name, (found, canonical) in facts.items():
        if found != canonical:
            return Difference(record.name, None, f"{name}: recorded {found!r}, canonical {canonical!r}")
    return _first_asked_difference(record, request, replay)


def _first_other_thought(record: Record, replay: Replay, model: Model) -> Difference | None:
    """The first thought about the prompt that is not the recorded one."""
    canonical = [thought_line(decode_thought(token_ids, model)) for token_ids in replay.thoughts]
    pairs = itertools.zip_longest(map(json.dumps, record.thoughts), map(json.dumps, canonical), fillvalue="nothing")
    for chunk, (found, thought) in enumerate(pairs):
        if found != thought:
            return Difference(record.name, None, f"thought after chunk {chunk}: recorded {found}, canonical {thought}")
    return None


def _ending(record: Record, request: Request, replay: Replay, model: Model) -> tuple[int, str | None, str]:
    """Number of recorded tokens that the canonical text may have, its finish reason (None if it goes on), and its text."""
    sampling = request.sampling
    n = len(record.token_ids)
    stops = all_stop_ids(sampling, model.eos_ids)
    broken = ~np.isfinite(replay.logprobs[: sampling.max_tokens])  # also for the token after the last
    stopped = np.isin(replay.targets[: min(n, sampling.max_tokens)], stops)
    length, finish_reason = (sampling.max_tokens, "length") if n >= sampling.max_tokens else (n, None)
    if broken.any() and not stopped[: np.argmax(broken)].any():
        length = int(np.argmax(broken))
        finish_reason = "error"
    elif stopped.any():
        length = int(np.argmax(stopped)) + 1
        finish_reason = "stop"
    if model.tokenizer is None:
        return length, finish_reason, ""
    ids = record.token_ids[:length]
    found = find_stop(model.tokenizer.decode, ids, sampling.stop, first=1, begin=sampling.min_tokens) if sampling.stop else None
    if found is not None:
        return found[0], "stop", found[1]
    return length, finish_reason, model.tokenizer.decode(ids)


def _first_asked_difference(record: Record, request: Request, replay: Replay) -> Difference | None:
    """Where log-probabilities that the request asks for besides those of the new tokens first part from the recorded ones."""
    num_tokens = len(request.prompt_token_ids) + len(record.token_ids)
    for key, canonical in zip(LOGPROB_KEYS, asked_logprobs(request, num_tokens, replay.likeliest), strict=True):
        recorded = [json.dumps(entry) for entry in record.asked.get(key, ())]  # as text, in which -0.0 is not 0.0
        pairs = itertools.zip_longest(recorded, map(json.dumps, as_json(canonical)), fillvalue="nothing")
        for position, (found, entry) in enumerate(pairs):
            if found != entry:
                what = f"recorded {found}, canonical {entry}"
                if key == "top_logprobs":
                    return Difference(record.name, position, f"{key}: {what}")
                return Difference(record.name, None, f"{key}: token {position} of the prompt: {what}")
    return None


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(1 for raw in file if raw.strip())
    except OSError as error:
        raise InputError(f"--records {path}: {error.strerror}") from error
