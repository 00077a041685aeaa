"""Chunks of a job's lines: how workers cut a file, what the first of them found in it, and which chunk a worker does next.

The choice is a pure function of what the worker sees in the folder:

1. A chunk that has no claim.
2. One whose workers were all killed or frozen.
3. One to be checked, best on another host than those who did it, else by another worker; by one of them if no other lives.
4. With nothing else to do, one that others are about to do: stragglers get help.
"""

import dataclasses
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detspec.engine.policy import Needs
from detspec.errors import InputError
from detspec.jobs.chunk_folder import ChunkTask, Claim, View, host_of
from detspec.jobs.files import new_files
from detspec.jobs.prompts import Mark, PromptLines
from detspec.jobs.scan import Scan

MOST_CHUNKS = 4096  # more would make a folder slow to list
LEAST_CHUNKS = 256  # if each has a line at least
MOST_LINES = 16  # lines of a chunk, unless there would be too many chunks
MOST_LIVE = 3  # workers at one chunk
MOST_NAMED = 4  # workers that are waited for


@dataclasses.dataclass(frozen=True)
class ChunkedLines:
    """The lines of a job, cut into blocks of one size.

    Attributes:
        found: counts of the whole file.
        size: lines of a chunk, the last one perhaps fewer.
        marks: start of each chunk in the file.
    """

    found: Scan
    size: int
    marks: tuple[Mark, ...]

    def numbers(self, chunk: int) -> range:
        """The numbers of its lines."""
        return range(chunk * self.size, min((chunk + 1) * self.size, self.found.num_lines))

    def num_outputs(self, chunk: int) -> int:
        """Lines of output that it has."""
        return sum(self.found.counts[number] for number in self.numbers(chunk))


def cut(prompts: PromptLines, found: Scan, size: int | None) -> ChunkedLines:
    """`found` in chunks of `size` lines, by default up to 16, and as many as leave no more than 4096 chunks."""
    size = size or max(-(-found.num_lines // MOST_CHUNKS), min(MOST_LINES, found.num_lines // LEAST_CHUNKS), 1)
    return ChunkedLines(found, size, tuple(prompts.marks(size)))


def store(folder: Path, chunks: ChunkedLines) -> None:
    """Writes them for workers who come later, and for merging."""
    facts = {name: value for name, value in vars(chunks.found).items() if name not in ("counts", "needs")}
    text = json.dumps({**facts, "needs": chunks.found.needs._asdict()})
    with new_files(_path(folder, chunks.size)) as (file,):
        counts = np.frombuffer(chunks.found.counts, np.uint32)
        np.savez(file, counts=counts, marks=np.asarray(chunks.marks, np.int64), facts=np.frombuffer(text.encode(), np.uint8))


def load(folder: Path, size: int) -> ChunkedLines:
    """Reads what `store` wrote of chunks of `size` lines. Raises `InputError` if the file is missing or damaged."""
    path = _path(folder, size)
    try:
        with np.load(path, allow_pickle=False) as file:
            facts: dict[str, Any] = json.loads(file["facts"].tobytes())
            counts = array("I", file["counts"].astype(np.uint32).tobytes())
            marks = tuple(Mark(*map(int, row)) for row in file["marks"])
        facts |= {"needs": Needs(**facts["needs"]), "repeated": {int(n): why for n, why in facts["repeated"].items()}}
        return ChunkedLines(Scan(**facts, counts=counts), size, marks)
    except Exception as error:  # a damaged archive raises many kinds
        raise InputError(f"{path} is damaged ({error}): remove it and job.json, and start a worker again") from error


def _path(folder: Path, size: int) -> Path:
    return folder / f"scan.{size}.npz"


# Which chunk is next --------------------------------------------------------------------------------------------------------


def choose(
    view: View,
    worker: str,
    num_chunks: int,
    *,
    first: int,
    to_check: Sequence[int] = (),
    authors: Callable[[ChunkTask], Collection[str]] = lambda task: (),
) -> ChunkTask | None:
    """Makes choices 1 to 3 for `worker`; None for nothing.

    All chunks before `first` have claims. `to_check` are the chunks that have to be done twice, `authors` those who did one.
    """
    for task in map(ChunkTask, range(first, num_chunks)):
        if task not in view.done and task not in view.claims:
            return task
    for task, claims in sorted(view.claims.items()):
        if not task.is_check and _is_left(claims, worker):
            return task
    for chunk in to_check:
        check = ChunkTask(chunk, is_check=True)
        is_due = ChunkTask(chunk) in view.done and check not in view.done
        if is_due and may_check(worker, authors(ChunkTask(chunk)), view) and _is_left(view.claims.get(check, ()), worker):
            return check
    return None


def choose_to_help(view: View, worker: str) -> ChunkTask | None:
    """The chunk of other workers that `worker` may do as well, that with the fewest workers; None for none."""
    candidates = []
    for task, claims in view.claims.items():
        num_live = sum(claim.is_live for claim in claims)
        if not task.is_check and num_live < MOST_LIVE and all(claim.worker != worker for claim in claims):
            candidates.append((num_live, -task.chunk, task))
    return min(candidates)[2] if candidates else None


def may_check(worker: str, authors: Collection[str], view: View) -> bool:
    """Whether `worker` may do again what `authors` did: one of them only if no other worker lives, another one on their hosts
    only if none on other hosts is free."""
    if worker in authors:
        return view.live <= {*authors, worker}
    hosts = set(map(host_of, authors))
    if host_of(worker) not in hosts:
        return True
    busy = {claim.worker for claims in view.claims.values() for claim in claims}
    return not any(host_of(name) not in hosts for name in view.live - busy)


def left_to(view: View, tasks: Collection[ChunkTask], worker: str) -> str:
    """The chunks of `tasks` that other workers than `worker` have to finish: `3 chunks: 2 at a-1-x, 1 at b-2-y`."""
    left = [task for task in tasks if task not in view.done]
    live = [{claim.worker for claim in view.claims.get(task, ()) if claim.is_live} - {"", worker} for task in left]
    at = Counter(name for names in live for name in sorted(names)).most_common()  # of equal numbers in the order of chunks
    parts = [f"{number} at {name}" for name, number in at[:MOST_NAMED]]
    parts += [f"others at {len(at) - MOST_NAMED} more"] if len(at) > MOST_NAMED else []
    parts += [f"{free} to be taken"] if (free := live.count(set())) else []
    return f"{len(left)} chunk{'s' * (len(left) != 1)}: {', '.join(parts)}"


def is_to_check(chunk: int, share: float, job: str) -> bool:
    """Whether a chunk of the `job` is among the `share` that is done twice; the same for all workers, and for larger shares."""
    digest = hashlib.blake2b(f"{job}/{chunk}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _is_left(claims: Sequence[Claim], worker: str) -> bool:
    """Whether nobody who claimed a task lives, and `worker` did not claim it."""
    return not any(claim.is_live or claim.worker == worker for claim in claims)
