"""Merges the journals of workers without fixed shards into the output of one job, and compares what was done twice."""

import dataclasses
import itertools
import shutil
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from detspec.errors import InputError
from detspec.jobs.chunk_folder import host_of
from detspec.jobs.files import new_files, sibling
from detspec.jobs.journal import line_of, read_journal, sound_lines
from detspec.jobs.lines import Output
from detspec.jobs.manifest import header_of
from detspec.jobs.merge import add_starts
from detspec.jobs.output import line_id, put_together
from detspec.jobs.overwrite import check_free
from detspec.jobs.stored_scan import Chunks, load
from detspec.jobs.worker import JOB, REJECTS, read_job
from detspec.read_json import read_json_object

NOWHERE = -1
MOST_NAMED = 10
MOST_OPEN = 64  # journals


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two workers gave other bytes for one line of output."""

    id: str
    number: int  # of the line of input, from 0
    chunk: int
    workers: tuple[str, str]

    def __str__(self) -> str:
        hosts = " and ".join(dict.fromkeys(map(host_of, self.workers)))
        return f"id {self.id!r} (line {self.number}, chunk {self.chunk}): {hosts}, see {' and '.join(self.workers)}"


def merge_chunks(out: Path, folder: Path, *, fresh: bool = False) -> dict[str, Any]:
    """Writes output, statistics, manifest and rejected lines of the job in `folder` as `out`; returns the statistics.

    Raises `InputError` if lines are missing, workers gave different bytes for the same line, or `out` belongs to another
    job and is not to be `fresh`.
    """
    job = read_job(folder)
    if job is None:
        raise InputError(f"{folder} has no {JOB}: no worker has read the prompts yet")
    try:
        header = header_of(job)
        chunks = load(folder, job.pop("chunk_lines"))
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / JOB} was changed, or is none of this version: {error!r}") from error
    if not fresh:
        check_free(out, header)
    with Journals(chunks) as journals:
        for path in sorted(folder.glob("*.journal")):
            journals.add(path, header)
        journals.check(folder)
        stats = [found for path in sorted(folder.glob("*.stats.json")) if (found := read_json_object(path)) is not None]
        last_start = add_starts(stats) if stats else {}
        if chunks.found.num_rejected:
            with new_files(sibling(out, "rejects")) as (file,), (folder / REJECTS).open("rb") as rejects:
                shutil.copyfileobj(rejects, file)
        told = {"num_workers": len(journals.paths), "num_compared": journals.num_compared, "last_start": last_start}
        return put_together(journals, out, job, chunks.found, told).stats


class Journals:
    """The lines of output in the journals of all workers; a context manager.

    Attributes:
        paths: the journals.
        num_tokens: tokens of all lines, each once.
        num_compared: how many more times lines were there, and had the same bytes.
        failed: output indices of completions with finish reason "error".
    """

    def __init__(self, chunks: Chunks) -> None:
        self.paths: list[Path] = []
        self.num_tokens = 0
        self.num_compared = 0
        self.failed: set[int] = set()
        self._chunks = chunks
        self._starts = array("Q", [0, *itertools.accumulate(chunks.found.counts)])
        self._offsets = array("q", [NOWHERE]) * self._starts[-1]
        self._journals = array("I", [0]) * self._starts[-1]
        self._differences: list[Difference] = []
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> "Journals":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, path: Path, header: Mapping[str, Any]) -> None:
        """Reads the journal at `path`; `InputError` if it belongs to another job."""
        journal = read_journal(path, header)
        if journal is None:  # its worker was killed before it wrote anything
            return
        self.paths.append(path)
        offset = journal.end
        for raw in sound_lines(path, offset):
            found = line_of(raw)
            counts = self._chunks.found.counts
            if found is None or found[0] >= len(counts) or found[1].index >= counts[found[0]]:
                raise InputError(f"{path} holds an entry of another job at byte {offset}: remove it, and start a worker again")
            self._note(*found, offset)
            offset += len(raw)

    def check(self, folder: Path) -> None:
        """Raises `InputError` if a line of output is missing, or was there twice with different bytes."""
        if self._differences:
            named = "; ".join(map(str, self._differences[:MOST_NAMED]))
            hosts = Counter(host for found in self._differences for host in set(map(host_of, found.workers)))
            tally = ", ".join(f"{host} in {number}" for host, number in hosts.most_common(MOST_NAMED))
            raise InputError(
                f"{len(self._differences)} lines were done twice with different bytes, which one kind of machine never does: "
                f"{named}. Involved: {tally}. Remove the journals of the host that is wrong from {folder}, and start a worker "
                "elsewhere: it does their chunks again"
            )
        missing = [place for place, offset in enumerate(self._offsets) if offset == NOWHERE]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(self._offsets)} completions are missing in {folder}: start a worker again, which "
                "does what is left"
            )

    def lines(self) -> Iterator[bytes]:
        """All lines of output, in the order of the input."""
        for place in range(len(self._offsets)):
            yield self._line(place).line + b"\n"

    def _note(self, number: int, output: Output, offset: int) -> None:
        place = self._starts[number] + output.index
        if self._offsets[place] == NOWHERE:
            self._offsets[place] = offset
            self._journals[place] = len(self.paths) - 1
            self.num_tokens += output.num_tokens
            if output.finish_reason == "error":
                self.failed.add(place)
        elif self._line(place).line == output.line:
            self.num_compared += 1
        else:
            workers = (self.paths[self._journals[place]].stem, self.paths[-1].stem)
            self._differences.append(Difference(line_id(output.line), number, number // self._chunks.size, workers))

    def _line(self, place: int) -> Output:
        path = self.paths[self._journals[place]]
        if path not in self._files:
            if len(self._files) == MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[path] = path.open("rb")
        self._files[path].seek(self._offsets[place])
        found = line_of(self._files[path].readline())
        if found is None:
            raise InputError(f"{path} was damaged at byte {self._offsets[place]}: remove it, and start a worker again")
        return found[1]
