"""Token rows for training: every batch is a pure function of (corpus, seed, step)."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers

from detspec.config import check_counts
from detspec.errors import InputError
from detspec.train.corpus import EOS_ID, Document


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of the run in one shape: `num_steps` batches of `batch_size` rows of `seq_len` tokens."""

    num_steps: int
    batch_size: int
    seq_len: int

    def __post_init__(self) -> None:
        check_counts(self, "num_steps", "batch_size", "seq_len")


def batch_fn(phases: Sequence[Phase], documents: Sequence[np.ndarray], seed: int) -> Callable[[int], np.ndarray]:
    """`step -> batch` from 0-based steps to rows of `documents`: int32 `[B, T + 1]` in the shape of the step's phase.

    The order of the documents and their cuts change every epoch; each phase starts a new epoch.
    """
    rows_per_epoch = {phase.seq_len: len(cut_rows(documents, phase.seq_len)) for phase in phases}

    @functools.lru_cache(maxsize=2)
    def epoch_rows(seq_len: int, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((seed, seq_len, epoch))
        rows = cut_rows([documents[i] for i in rng.permutation(len(documents))], seq_len)
        return rows[rng.permutation(len(rows))]

    def batch_at(step: int) -> np.ndarray:
        phase, step = phase_at(phases, step)
        per_epoch = rows_per_epoch[phase.seq_len]
        rows = range(step * phase.batch_size, (step + 1) * phase.batch_size)
        return np.stack([epoch_rows(phase.seq_len, row // per_epoch)[row % per_epoch] for row in rows])

    return batch_at


def phase_at(phases: Sequence[Phase], step: int) -> tuple[Phase, int]:
    """The phase of 0-based `step`, and the step within that phase."""
    within = step
    for phase in phases:
        if within < phase.num_steps:
            return phase, within
        within -= phase.num_steps
    raise IndexError(f"step {step} is beyond the {step - within} steps of the run")


def cut_rows(documents: Sequence[np.ndarray], seq_len: int) -> np.ndarray:
    """Joins documents and cuts rows of `seq_len + 1`; neighbours share one token, so that each token is predicted once.

    seq_len 3:  [0 7 8 0 5 6 9 4 2]  ->  [0 7 8 0]  [0 5 6 9]     a rest shorter than a row is dropped
    """
    joined = np.concatenate(documents)
    num_rows = (joined.size - 1) // seq_len
    if num_rows < 1:
        raise InputError(f"{joined.size} tokens make no row of {seq_len} + 1; give a shorter seq_len or more text")
    starts = np.arange(num_rows)[:, None] * seq_len
    return joined[starts + np.arange(seq_len + 1)]


def encode_documents(tokenizer: tokenizers.Tokenizer, documents: Sequence[Document]) -> list[np.ndarray]:
    """Token ids of each document as int32, `EOS` first."""
    encodings = tokenizer.encode_batch([document.text for document in documents])
    return [np.array([EOS_ID, *encoding.ids], np.int32) for encoding in encodings]


def digest_documents(documents: Sequence[np.ndarray]) -> str:
    """SHA-256 in hex of the documents' token ids. Runs with the same digest and config train on the same rows."""
    digest = hashlib.sha256()
    for tokens in documents:
        digest.update(np.int64(tokens.size).tobytes() + tokens.tobytes())
    return digest.hexdigest()
