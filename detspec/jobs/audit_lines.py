"""Audit of OpenAI's batch lines: each is answered once more, and the answer is compared with the recorded one.

Bodies hold tokens and log-probabilities if they ask for them, but always a digest of both. So each prompt is continued by the
canonical pass, without drafts, whatever the body of the answer holds. The first field that differs is named.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.policy import Needs
from detspec.engine.request import Completion, Request, completion_digest
from detspec.errors import InputError
from detspec.jobs.batch_lines import KEY, BatchReader, parse_id
from detspec.jobs.difference import AuditReport, Difference, first_other
from detspec.jobs.generation import StopSignals, Workload, generate
from detspec.jobs.lines import CheckedLine, Output, pass_over
from detspec.jobs.prompts import JobSpec
from detspec.jobs.records import PromptsById, machine_differences
from detspec.progress import Progress

FIELDS = ("id", KEY, "response", "error")


def audit_lines(model: Model, records: Path, prompts: PromptsById, *, max_requests: int, progress: Progress) -> AuditReport:
    """Answers the lines of `records`, the output of the job that read `prompts`, again; `max_requests` samples run together.

    Raises `InputError` if a line is malformed, has no prompt, or occurs twice.
    """
    origin = prompts.origin
    config = dataclasses.replace(origin.engine, max_requests=max_requests, num_pages=None, method="none", thoughts="none")
    engine = Engine(model, config)
    report = AuditReport(machine=machine_differences(origin, str(engine.fingerprint().get("mesh"))))
    spec = JobSpec(prompts.file, origin.sampling, is_openai=True, created=origin.created)
    reader = _Again(BatchReader(engine, spec, {}, origin.fingerprint), origin.digest)
    waiting: dict[int, tuple[dict[str, Any], bool]] = {}  # by number of the prompt: the record, and whether it is deterministic

    def lines() -> Iterator[CheckedLine]:
        for record, (number, raw) in _read(records, prompts):
            asked = reader.asked(number, raw)
            waiting[number] = record, all(request.sampling.deterministic for request in asked.facts.requests)
            yield asked

    def compare(number: int, output: Output) -> None:
        progress.finished()
        record, is_deterministic = waiting.pop(number)
        what = first_other(record, json.loads(output.line))
        found = None if what is None else Difference(record[KEY], None, what)
        report.count(found, output.num_tokens, deterministic=is_deterministic)

    began = time.perf_counter()
    work = Workload(lines(), reader, max_requests, Needs(deterministic=True, ordinary=False, processing=False))
    generate(engine, work, compare, progress, StopSignals())
    report.replay_s = time.perf_counter() - began
    return report


class _Again:
    """A reader of lines whose samples are all made deterministic, with digests as if their job answered them."""

    def __init__(self, reader: BatchReader, context: str) -> None:
        """`context` digests all that the bits of the records depend on."""
        self.id_of = reader.id_of
        self._reader = reader
        self._context = context

    def asked(self, number: int, raw: bytes, note_id: Callable[[str], object] = pass_over) -> CheckedLine:
        """Line `number`; its `facts` are the line as its job asked for it."""
        asked = self._reader.asked(number, raw, note_id)
        requests = [
            dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, deterministic=True))
            for request in asked.requests
        ]
        return dataclasses.replace(asked, requests=tuple(requests), facts=asked)

    def outputs(self, asked: CheckedLine, completions: Sequence[Completion]) -> Sequence[Output]:
        """The line of output, with the last of the completions."""
        samples = {(sample.id, sample.index): sample for request in asked.facts.requests for sample in request.samples()}
        if len(completions) < len(samples):
            return ()
        return self._reader.outputs(asked.facts, [self._in_place(each, samples[each.id, each.index]) for each in completions])

    def _in_place(self, completion: Completion, sample: Request) -> Completion:
        logprobs = np.asarray(completion.logprobs, np.float32)
        thoughts = [thought.token_ids for thought in completion.thoughts]
        digest = completion_digest(sample, completion.token_ids, logprobs, thoughts, self._context)
        return dataclasses.replace(completion, digest=digest)


def _read(records: Path, prompts: PromptsById) -> Iterator[tuple[dict[str, Any], tuple[int, bytes]]]:
    """Each line of output, with the line of input that it answers."""
    seen: set[str] = set()
    with records.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                record = parse_id(raw)
                if record.keys() != set(FIELDS):
                    raise InputError(f"has the keys {', '.join(record)}; lines of OpenAI's output have {', '.join(FIELDS)}")
                if record[KEY] in seen:
                    raise InputError(f"the record {record[KEY]!r} occurs twice")
            except InputError as error:
                raise InputError(f"{records} line {number}: {error}") from error
            seen.add(record[KEY])
            yield record, prompts.line(record[KEY])
