"""Audit of a job's output: every record is replayed through the canonical pass and compared bit for bit.

1. The manifest beside the records says which model, schedule and sampling they claim; the prompts file says what was asked.
2. The replayer reads the recorded tokens, teacher-forced: at each it says what the request gets there.
3. `first_difference` works out from that how the completion must read, and names where the record first parts from it.

Up to the first difference the record is the canonical text, so nothing has to be generated.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.progress import Progress
from detspec.engine.replayer import Replay, Replayer
from detspec.engine.request import Request, completion_digest
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.jobs.records import Manifest, PromptsById, Record, read_manifest, read_records
from detspec.sampling import all_stop_ids

MOST_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a record first parts from what its request gets.

    Attributes:
        id: of the record.
        position: index in `token_ids`, 0 being the first token after the prompt; None for facts about the whole record.
        what: what is recorded there, and what is canonical.
    """

    id: str
    position: int | None
    what: str


@dataclasses.dataclass
class AuditReport:
    """What an audit found.

    Attributes:
        num_records: deterministic records.
        num_ordinary: records of requests that were not deterministic: they promise nothing.
        num_ordinary_reproduced: those of them that read as the canonical pass has it nevertheless.
        num_tokens: new tokens of all records.
        differences: one for each deterministic record that differs.
        machine: where this machine's fingerprint is not the manifest's, a sentence each.
        replay_s: seconds of replaying.
    """

    num_records: int = 0
    num_ordinary: int = 0
    num_ordinary_reproduced: int = 0
    num_tokens: int = 0
    differences: list[Difference] = dataclasses.field(default_factory=list)
    machine: list[str] = dataclasses.field(default_factory=list)
    replay_s: float = 0.0

    @property
    def reproduced(self) -> bool:
        """Every deterministic record is what its request gets."""
        return not self.differences

    def table(self) -> str:
        """The report for people."""
        lines = [f"another machine: {line}" for line in self.machine]
        lines += [
            f"records      {self.num_records:8}",
            f"  reproduced {self.num_records - len(self.differences):8}",
            f"  differing  {len(self.differences):8}",
        ]
        if self.num_ordinary:
            equal = f"{self.num_ordinary_reproduced} of them equal the canonical bits"
            lines.append(f"ordinary     {self.num_ordinary:8}   promise nothing; {equal}")
        if self.differences:
            lines += ["", "first difference of each record; tokens are counted from 0 after the prompt"]
            for found in self.differences[:MOST_SHOWN]:
                where = "record" if found.position is None else f"token {found.position}"
                lines.append(f"  {found.id:24} {where:10} {found.what}")
            if len(self.differences) > MOST_SHOWN:
                lines.append(f"  and {len(self.differences) - MOST_SHOWN} more")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return dataclasses.asdict(self)


def run_audit(model: Model, records: Path, *, prompts: Path | None = None, max_rows: int = 32) -> AuditReport:
    """Replays the output `records` of a job.

    Args:
        model: the model that the records claim.
        records: a file that `detspec generate` wrote, its manifest beside it.
        prompts: the file it read; by default the one that the manifest names.
        max_rows: records replayed together.

    Raises:
        InputError: files are missing or malformed, a record has no prompt, or `model` is not the one of the manifest.
    """
    manifest = read_manifest(records)
    if manifest.fingerprint["model"] != model.digest:
        raise InputError(
            f"the records are of the model with digest {manifest.fingerprint['model']}, but this one's is {model.digest}: "
            "name the right folder with --model"
        )
    if prompts is None:
        if manifest.source in (None, "-"):
            raise InputError("the manifest does not name a file of prompts: name it with --prompts")
        prompts = Path(str(manifest.source))
    report = AuditReport(machine=machine_differences(manifest))
    replayer = Replayer(model, schedule=manifest.schedule, max_rows=max_rows, max_len=manifest.max_len)
    waiting: deque[tuple[Record, Request]] = deque()
    with PromptsById(prompts, manifest.sha256) as asked, Progress(_count_lines(records), "records") as progress:
        progress.stage("compiling and certifying")
        replayer.prepare()
        progress.stage("replaying")
        began = time.perf_counter()
        for replay in replayer.run(_to_replay(model, records, asked, manifest, waiting)):
            record, request = waiting.popleft()
            found = first_difference(record, request, replay, model, manifest.digest)
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
    if not report.num_records + report.num_ordinary:
        raise InputError(f"{records} holds no records")
    return report


def machine_differences(manifest: Manifest) -> list[str]:
    """Where this machine is not the one that the manifest names."""
    return [
        f"{name} is {here!r}, the records' was {manifest.fingerprint.get(name)!r}"
        for name, here in fingerprint().items()
        if manifest.fingerprint.get(name) != here
    ]


def _to_replay(
    model: Model, records: Path, prompts: PromptsById, manifest: Manifest, waiting: deque[tuple[Record, Request]]
) -> Iterator[tuple[Request, Sequence[int]]]:
    """Requests and tokens for the replayer; `waiting` gets the records that belong to them."""
    config = EngineConfig(
        max_rows=1, max_len=manifest.max_len, method="none", num_speculative_tokens=1, schedule=manifest.schedule
    )
    reader = Engine(model, config)  # reads requests as the job's engine did
    seen: set[str] = set()
    for record in read_records(records, model.cfg.vocab_size):
        if record.id in seen:
            raise InputError(f"{records}: the id {record.id!r} occurs twice")
        seen.add(record.id)
        request = prompts.request(record.id, reader, manifest.sampling)
        waiting.append((record, request))
        yield request, record.token_ids[: request.sampling.max_tokens]


def first_difference(record: Record, request: Request, replay: Replay, model: Model, context: str) -> Difference | None:
    """Where `record` first parts from what `request` gets; None if nowhere. `context` is the manifest's digest."""
    length, finish_reason = _ending(record, request, replay, model)
    recorded = record.token_ids
    shared = min(len(recorded), len(record.logprobs), length)
    targets, logprobs = replay.targets[:shared], replay.logprobs[:shared]
    # Float64 holds every float32, so a decimal that is not exactly the float32's differs, too.
    logprobs_differ = record.logprobs[:shared].view(np.uint64) != logprobs.astype(np.float64).view(np.uint64)
    differs = (targets != np.asarray(recorded[:shared], np.int32)) | logprobs_differ
    if differs.any():
        at = int(np.argmax(differs))
        if targets[at] != recorded[at]:
            return Difference(record.id, at, f"token: recorded {recorded[at]}, canonical {targets[at]}")
        what = f"log-probability: recorded {float(record.logprobs[at])!r}, canonical {float(logprobs[at])!r}"
        return Difference(record.id, at, what)
    if len(recorded) > length:
        what = f"token: recorded {recorded[length]}, but the canonical text ends before it ({finish_reason})"
        return Difference(record.id, length, what)
    if finish_reason is None:
        what = f"token: the record ends, but the canonical text goes on with {replay.targets[length]}"
        return Difference(record.id, length, what)
    if len(record.logprobs) != length:
        return Difference(record.id, shared, f"log-probability: recorded {len(record.logprobs)} for {length} tokens")
    facts = {
        "finish_reason": (record.finish_reason, finish_reason),
        "prompt_len": (record.prompt_len, len(request.prompt_token_ids)),
        "text": (record.text, "" if model.tokenizer is None else model.tokenizer.decode(recorded)),
        "digest": (record.digest, completion_digest(request, recorded, logprobs, context)),
    }
    for name, (found, canonical) in facts.items():
        if found != canonical:
            return Difference(record.id, None, f"{name}: recorded {found!r}, canonical {canonical!r}")
    return None


def _ending(record: Record, request: Request, replay: Replay, model: Model) -> tuple[int, str | None]:
    """How many tokens the recorded text may have, and why it ends there; as far as it is recorded, and None, if it goes on."""
    stops = all_stop_ids(request.sampling, model.eos_ids)
    n, max_tokens = len(record.token_ids), request.sampling.max_tokens
    broken = ~np.isfinite(replay.logprobs[:max_tokens])  # that of the token after the last ends a text, too
    stopped = np.isin(replay.targets[: min(n, max_tokens)], stops)
    if broken.any() and not stopped[: np.argmax(broken)].any():
        return int(np.argmax(broken)), "error"
    if stopped.any():
        return int(np.argmax(stopped)) + 1, "stop"
    return (max_tokens, "length") if n >= max_tokens else (n, None)


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(1 for raw in file if raw.strip())
    except OSError as error:
        raise InputError(f"--records {path}: {error.strerror}") from error
