"""A job of several processes that share a mesh: the first writes journal and results, the others run what it runs.

Both sides exchange, in this order: what the job is, whether its output is already complete, which requests the journal holds,
and at the end the outcome.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from detspec.engine.engine_group import AnyEngine
from detspec.errors import InputError
from detspec.jobs.generation import Work, generate
from detspec.jobs.lines import Output
from detspec.jobs.manifest import differences
from detspec.jobs.prompts import JobSpec
from detspec.jobs.scan import read_lines
from detspec.jobs.signals import StopSignals
from detspec.progress import Progress

Outcome = tuple[int, int]  # failed completions and rejected lines


def check_same_job(engine: AnyEngine, header: Mapping[str, Any]) -> None:
    """Raises `InputError` unless all processes were given the job with `header`: the same prompts, options and model."""
    headers = [json.loads(content) for content in engine.agreement.exchange(json.dumps(header).encode())]
    for process, other in enumerate(headers):
        if other != headers[0]:
            parts = "; ".join(differences(other, headers[0], them=f"process {process}", us="process 0"))
            raise InputError(
                f"processes that share a mesh need the same job: {parts}. Start all with the same command, files and machines; "
                "processes that are to run apart need JAX_NUM_PROCESSES=1"
            )


def tell(engine: AnyEngine, outcome: Outcome | None) -> None:
    """Tells the others the `outcome` of the job, or that it is still to come."""
    engine.agreement.exchange(json.dumps(outcome).encode())


@contextlib.contextmanager
def refusals_told(engine: AnyEngine) -> Iterator[None]:
    """Tells the others if the first process refuses the job, in place of the outcome: they would wait for it."""
    try:
        yield
    except InputError as error:
        engine.agreement.exchange(json.dumps(str(error)).encode())
        raise


def tell_kept(engine: AnyEngine, kept: Sequence[bool]) -> None:
    """Tells the others which requests of the shard need not be generated, because all their completions are kept."""
    engine.agreement.exchange(np.packbits(np.asarray(kept, bool)).tobytes())


def follow(engine: AnyEngine, spec: JobSpec, signals: StopSignals) -> Outcome:
    """Generates what the first process does not keep, and writes nothing; returns the outcome.

    Raises `InputError` if a line is malformed or the first process refuses the job, and `Stopped` if a signal arrived at any
    process.
    """
    if (outcome := _told(engine)) is not None:
        return outcome

    def pass_over(number: int, output: Output) -> None:
        """The first process keeps it."""

    with read_lines(engine, spec) as reading:
        found = reading.found
        content = np.frombuffer(engine.agreement.exchange(b"")[0], np.uint8)
        kept = np.unpackbits(content, count=len(found.counts)).astype(bool).tolist()
        num_todo = sum(count for count, is_kept in zip(found.counts, kept, strict=True) if not is_kept)
        work = Work(reading.todo(lambda number: kept[number - found.first]), reading.reader, num_todo, found.needs)
        with Progress(num_todo, "requests", shown=False) as progress:
            generate(engine, work, pass_over, progress, signals)
    outcome = _told(engine)
    assert outcome is not None
    return outcome


def _told(engine: AnyEngine) -> Outcome | None:
    """Returns what the first process told; raises `InputError` if it refuses the job."""
    outcome = json.loads(engine.agreement.exchange(b"")[0])
    if isinstance(outcome, str):
        raise InputError(outcome)
    return None if outcome is None else (outcome[0], outcome[1])
