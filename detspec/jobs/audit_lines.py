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
from detspec.jobs.audit_report import AuditReport, Difference
from detspec.jobs.batch_lines import KEY, BatchReader, parse_id
from detspec.jobs.generation import Work, generate
from detspec.jobs.lines import Asked, Output, pass_over
from detspec.jobs.origin import Origin, machine_differences
from detspec.jobs.prompts import JobSpec
from detspec.jobs.records import PromptsById
from detspec.jobs.signals import StopSignals
from detspec.progress import Progress

FIELDS = ("id", KEY, "response", "error")
# Fields of a body that are compared before the others: those from which the others follow.
FIRST = ("response", "body", "choices", "token_ids", "logprobs", "token_logprobs", "content")
NOTHING = object()  # in place of a value that is missing
MOST_CHARS = 80  # of a value that is named


def audit_lines(
    model: Model, records: Path, prompts: PromptsById, origin: Origin, *, max_requests: int, progress: Progress
) -> AuditReport:
    """Answers the lines of `records`, the output of the job of `origin`, again; `max_requests` samples run together.

    Raises `InputError` if a line is malformed, has no prompt, or occurs twice.
    """
    config = dataclasses.replace(origin.engine, max_requests=max_requests, num_pages=None, method="none", thoughts="none")
    engine = Engine(model, config)
    report = AuditReport(machine=machine_differences(origin, str(engine.fingerprint()["mesh"])))
    spec = JobSpec(prompts.file, origin.sampling, is_openai=True, created=origin.created)
    reader = _Again(BatchReader(engine, spec, {}, origin.fingerprint), origin.digest)
    waiting: dict[int, tuple[dict[str, Any], bool]] = {}  # by number of the prompt: the record, and whether it is deterministic

    def lines() -> Iterator[Asked]:
        for record, (number, raw) in _read(records, prompts):
            asked = reader.asked(number, raw)
            waiting[number] = record, all(request.sampling.deterministic for request in asked.facts.requests)
            yield asked

    def compare(number: int, output: Output) -> None:
        progress.finished()
        record, is_deterministic = waiting.pop(number)
        what = first_difference(record, json.loads(output.line))
        report.num_tokens += output.num_tokens
        if is_deterministic:
            report.num_records += 1
            report.differences += [] if what is None else [Difference(record[KEY], None, what)]
        else:
            report.num_ordinary += 1
            report.num_ordinary_reproduced += what is None

    began = time.perf_counter()
    work = Work(lines(), reader, max_requests, Needs(deterministic=True, ordinary=False, processing=False))
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

    def asked(self, number: int, raw: bytes, note_id: Callable[[str], object] = pass_over) -> Asked:
        """Line `number`; its `facts` are the line as its job asked for it."""
        asked = self._reader.asked(number, raw, note_id)
        requests = [
            dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, deterministic=True))
            for request in asked.requests
        ]
        return dataclasses.replace(asked, requests=tuple(requests), facts=asked)

    def outputs(self, asked: Asked, completions: Sequence[Completion]) -> Sequence[Output]:
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


def first_difference(recorded: Any, canonical: Any, name: str = "") -> str | None:
    """The first field in which two answers differ, in words: `choices[0].text: recorded "a", canonical "b"`; None if equal."""
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
    return next((found for key, a, b in pairs if (found := first_difference(a, b, key)) is not None), None)


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
