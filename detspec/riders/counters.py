"""Counts of speculation for a sequence: `Stats` declares what is counted, and all else follows from it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import filled
from detspec.config import ModelConfig
from detspec.riders.rider import Capacity, Committed, Rider
from detspec.struct import Struct


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of speculation for a request; names are vLLM's where it has them. They are no deterministic facts.

    Attributes:
        num_verify_passes: canonical passes that verified a span of the text.
        num_draft_tokens: drafted tokens that these passes read.
        num_accepted_draft_tokens: drafted tokens that equal the pass's choice, and all before them do.
        num_rollbacks: passes after which the cache was set back.
        num_recomputed_tokens: drafted tokens from the first rejected one on.
        num_read_passes: canonical passes that held chunks of a prompt that was read with thoughts.
        num_draft_thoughts: drafted thoughts that were verified.
        num_accepted_thoughts: drafted thoughts that were accepted.
        num_rejected_thoughts: passes that ended at a rejected thought.
    """

    num_verify_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_rollbacks: int = 0
    num_recomputed_tokens: int = 0
    num_read_passes: int = 0
    num_draft_thoughts: int = 0
    num_accepted_thoughts: int = 0
    num_rejected_thoughts: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 1 if nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 1.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed by one verification on average: `1 + accepted / passes`."""
        return 1 + self.num_accepted_draft_tokens / self.num_verify_passes if self.num_verify_passes else 1.0

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(*(getattr(self, name) + getattr(other, name) for name in COUNTED))

    def __str__(self) -> str:
        """Shows a line for each count and each rate; `repr` is one line."""
        rates = ("draft_acceptance_rate", "mean_acceptance_length")
        lines = {name: [f"{getattr(self, name):,}"] for name in COUNTED}
        return _table(lines | {name: [f"{getattr(self, name):.2f}"] for name in rates})


COUNTED = tuple(field.name for field in dataclasses.fields(Stats))  # the order of columns


class Counters(Struct):
    """The `Stats` of each sequence; `counters.num_rollbacks` is the column of that name, `[B]` int32."""

    counts: jax.Array  # [B, 9] int32, in the order of `COUNTED`

    def __getattr__(self, name: str) -> jax.Array:
        if name not in COUNTED:
            raise AttributeError(name)
        return self.counts[:, COUNTED.index(name)]

    def __str__(self) -> str:
        """Shows a line for each count, with a column for each sequence; inside a program as `repr` does."""
        if isinstance(self.counts, jax.core.Tracer):
            return repr(self)
        columns = np.asarray(self.counts).T
        return _table({name: [f"{number:,}" for number in column] for name, column in zip(COUNTED, columns, strict=True)})

    def add(self, **more: jax.Array) -> "Counters":
        """Adds `[B]` int32 or bool to some counts."""
        B = self.counts.shape[0]
        added = [jnp.asarray(more.pop(name, np.zeros(B, np.int32)), jnp.int32) for name in COUNTED]
        assert not more, f"not counted: {more}"
        return Counters(self.counts + jnp.stack(added, axis=1))


def _table(lines: dict[str, list[str]]) -> str:
    """A line for each name, its values to the right below each other."""
    first = max(map(len, lines))
    width = max(len(value) for values in lines.values() for value in values)
    return "\n".join(f"{name:{first}}{''.join(f'  {value:>{width}}' for value in values)}" for name, values in lines.items())


def _init(cfg: ModelConfig, capacity: Capacity) -> Counters:
    return Counters(filled((capacity.num_sequences, len(COUNTED)), 0, np.int32))


def _begin(packed: Any, like: Counters) -> Counters:
    return jax.tree.map(jnp.zeros_like, like)


def _observe(counters: Counters, committed: Committed) -> Counters:
    """A rollback is a draft that was rejected inside the committed run; what a stop token made void is none."""
    verified = committed.verified
    if verified is None:
        return counters
    in_pass = verified.in_pass.astype(jnp.int32)
    drafted = verified.drafted * in_pass
    accepted = jnp.minimum(verified.accepted, committed.num_new) * in_pass
    rolled_back = verified.in_pass & (verified.accepted < verified.drafted) & (committed.num_new == verified.accepted + 1)
    return counters.add(
        num_verify_passes=in_pass,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        num_rollbacks=rolled_back,
        num_recomputed_tokens=jnp.where(rolled_back, drafted - verified.accepted, 0),
    )


COUNTERS = Rider("counters", init=_init, begin=_begin, observe=_observe)
