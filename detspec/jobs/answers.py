"""Reads outputs that are to be compared: completions, the state of `detspec.generate`, and files of jobs."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detspec.engine.request import Completion
from detspec.errors import InputError, shown
from detspec.jobs.convert_output import rows_of
from detspec.jobs.file_kinds import PARQUET
from detspec.jobs.tables import read_rows, read_schema
from detspec.state import GenState

AnyOutput = str | Path | Sequence[Completion] | GenState

KEYS = ("id", "token_ids", "logprobs")
MORE_KEYS = ("index", "text", "prompt_len", "logprobs_mode")
WHERE = "lines that `detspec generate` wrote have them; OpenAI's batch lines do not"


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The new tokens that a request got."""

    id: str  # of the request
    index: int  # number of the sample; 0 if it asked for one
    token_ids: tuple[int, ...]
    logprobs: np.ndarray  # [n] float32, nan for null
    text: str  # "" if unknown
    prompt_len: int | None  # None if unknown
    prompt: tuple[int, ...] | None  # None if unknown
    mode: str  # whose log-probabilities they are, see `SamplingParams.logprobs_mode`

    @property
    def name(self) -> str:
        """The id, with the number of any sample but the first: `a[2]`."""
        return f"{self.id}[{self.index}]" if self.index else self.id

    def asks_like(self, other: "Answer") -> bool:
        """Whether prompts, as far as both are known, and modes of log-probabilities are equal."""
        pairs = (self.prompt, other.prompt), (self.prompt_len, other.prompt_len), (self.mode, other.mode)
        return all(a is None or b is None or a == b for a, b in pairs)


def answers_of(output: AnyOutput) -> list[Answer]:
    """Reads all answers of `output`, in order.

    Raises `InputError` if a file is missing, no output of a job, or lacks log-probabilities; or for anything else than outputs.
    """
    if isinstance(output, str | Path):
        return list(_of_file(Path(output)))
    if isinstance(output, GenState):
        return list(_of_state(output))
    if isinstance(output, Sequence):
        completions = [each for each in output if isinstance(each, Completion)]
        if len(completions) == len(output):
            return [_of_completion(each) for each in completions]
    raise InputError(
        "an output must be a list of completions, the state that detspec.generate returns, or the path of a .jsonl or .parquet "
        f"file of a job, got {shown(output)}"
    )


def _of_completion(found: Completion) -> Answer:
    return Answer(
        id=found.id,
        index=found.index,
        token_ids=found.token_ids,
        logprobs=np.asarray(found.logprobs, np.float32),
        text=found.text,
        prompt_len=len(found.prompt_token_ids),
        prompt=found.prompt_token_ids,
        mode=found.logprobs_mode,
    )


def _of_state(state: GenState) -> Iterator[Answer]:
    """Sequences, named by their places."""
    parts = (state.tokens, state.logprobs, state.committed, state.sampling.prompt_len)
    for number, (tokens, logprobs, end, begin) in enumerate(zip(*map(np.asarray, parts), strict=True)):
        ids = tuple(tokens[:end].tolist())
        yield Answer(str(number), 0, ids[begin:], logprobs[begin:end], "", int(begin), ids[:begin], "raw")


def _of_file(path: Path) -> Iterator[Answer]:
    """Lines, or rows of a parquet file."""
    rows = _parquet_rows(path) if path.suffix == ".parquet" else rows_of(path)
    for number, row in enumerate(rows, start=1):
        try:
            yield _of_row(row)
        except InputError as error:
            raise InputError(f"{path}, record {number}: {error}") from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that `detspec convert-output` wrote, without what is not compared."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    names = [name for name in read_schema(path, PARQUET).names if name in (*KEYS, *MORE_KEYS)]
    for _, rows in read_rows(path, PARQUET, names, 0):
        if rows is not None:
            yield from rows.to_pylist()


def _of_row(row: Mapping[str, Any]) -> Answer:
    """The answer in a record; `InputError` if it lacks a key, or a value is of another kind."""
    if missing := [key for key in KEYS if row.get(key) is None]:
        raise InputError(f"lacks {', '.join(missing)}: {WHERE}")
    try:
        logprobs = np.asarray([np.nan if logprob is None else logprob for logprob in row["logprobs"]], np.float32)
        token_ids = tuple(map(int, row["token_ids"]))
    except (TypeError, ValueError) as error:
        raise InputError(f"token_ids and logprobs must be lists of numbers: {error}") from error
    if logprobs.shape != (len(token_ids),):
        raise InputError(f"has {len(token_ids)} token_ids and {logprobs.size} logprobs: there must be one for each token")
    return Answer(
        id=str(row["id"]),
        index=row.get("index") or 0,
        token_ids=token_ids,
        logprobs=logprobs,
        text=str(row.get("text") or ""),
        prompt_len=row.get("prompt_len"),
        prompt=None,
        mode=str(row.get("logprobs_mode") or "raw"),
    )
