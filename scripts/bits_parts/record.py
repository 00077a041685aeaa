"""Hashes of what a part found."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np


class Record:
    """Two hashes: of bits (tokens, log-probabilities, texts), and of digests (of completions, models, schedules and files)."""

    def __init__(self) -> None:
        self._bits = hashlib.sha256()
        self._digests = hashlib.sha256()

    def bits(self, *facts: Any) -> None:
        """Takes in plain values, or arrays by their bytes."""
        for fact in facts:
            self._bits.update(_bytes_of(fact))

    def digests(self, *facts: Any) -> None:
        """Takes in plain values."""
        for fact in facts:
            self._digests.update(_bytes_of(fact))

    def completions(self, completions: Iterable[Any]) -> None:
        """Takes in all that is deterministic about completions, in their order."""
        for done in completions:
            assert not done.error, done.error
            self.bits([done.id, done.index, list(map(int, done.token_ids)), done.finish_reason, done.text])
            self.bits(np.asarray(done.logprobs, np.float32), done.logprobs_mode, done.top_logprobs)
            self.bits(done.prompt_logprobs, done.prompt_top_logprobs)
            self.bits([[thought.text, list(map(int, thought.token_ids)), thought.is_cut] for thought in done.thoughts])
            self.digests(done.digest)

    @property
    def found(self) -> tuple[str, str]:
        """Both hashes, in hex."""
        return self._bits.hexdigest(), self._digests.hexdigest()


def _bytes_of(fact: Any) -> bytes:
    if isinstance(fact, bytes):
        return fact
    if isinstance(fact, np.ndarray):
        return str((fact.dtype, fact.shape)).encode() + fact.tobytes()
    return json.dumps(fact, sort_keys=True).encode()
