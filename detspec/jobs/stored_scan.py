"""What the first workers found in a file of prompts, stored for those who come later and for merging."""

import dataclasses
import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from detspec.engine.policy import Needs
from detspec.errors import InputError
from detspec.jobs.files import new_files
from detspec.jobs.prompts import Mark, PromptLines
from detspec.jobs.scan import Scan

MOST_CHUNKS = 4096  # more would make a folder slow to list
LEAST_CHUNKS = 256  # where that leaves at least a line each
MOST_LINES = 16  # of a chunk, unless there would be too many


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The lines of a job, cut into blocks of one size.

    Attributes:
        found: the scan of the whole file.
        size: lines of a chunk, the last one perhaps fewer.
        marks: where each chunk begins in the file.
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


def cut(prompts: PromptLines, found: Scan, size: int | None) -> Chunks:
    """`found` in chunks of `size` lines, by default up to 16, and as many as leave no more than 4096 chunks."""
    size = size or max(-(-found.num_lines // MOST_CHUNKS), min(MOST_LINES, found.num_lines // LEAST_CHUNKS), 1)
    return Chunks(found, size, tuple(prompts.marks(size)))


def store(folder: Path, chunks: Chunks) -> None:
    """Writes them."""
    facts = {name: value for name, value in vars(chunks.found).items() if name not in ("counts", "needs")}
    text = json.dumps({**facts, "needs": chunks.found.needs._asdict()})
    with new_files(_path(folder, chunks.size)) as (file,):
        counts = np.frombuffer(chunks.found.counts, np.uint32)
        np.savez(file, counts=counts, marks=np.asarray(chunks.marks, np.int64), facts=np.frombuffer(text.encode(), np.uint8))


def load(folder: Path, size: int) -> Chunks:
    """What `store` wrote of chunks of `size` lines. Raises `InputError` if the file is missing or damaged."""
    path = _path(folder, size)
    try:
        with np.load(path, allow_pickle=False) as file:
            facts: dict[str, Any] = json.loads(file["facts"].tobytes())
            counts = array("I", file["counts"].astype(np.uint32).tobytes())
            marks = tuple(Mark(*map(int, row)) for row in file["marks"])
        facts |= {"needs": Needs(**facts["needs"]), "repeated": {int(n): why for n, why in facts["repeated"].items()}}
        return Chunks(Scan(**facts, counts=counts), size, marks)
    except Exception as error:  # a damaged archive raises many kinds
        raise InputError(f"{path} is damaged ({error}): remove it and job.json, and start a worker again") from error


def _path(folder: Path, size: int) -> Path:
    return folder / f"scan.{size}.npz"
