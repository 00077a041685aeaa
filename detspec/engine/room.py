"""Room for the stop tokens and the biased tokens of one request.

Programs take them as arrays of a fixed length, so another room means other programs. It starts with the config's, and grows by
powers of two to what a request asks for. What is not used of it changes no bit.
"""

from collections.abc import Sequence
from typing import NamedTuple

from detspec.engine.policy import pow2_ceil
from detspec.sampling_params import SamplingParams, all_stop_ids


class Room(NamedTuple):
    """How many tokens of either kind one request may have."""

    stop_ids: int
    logit_bias: int

    def with_room_for(self, sampling: SamplingParams, eos_ids: Sequence[int]) -> "Room":
        """This room, or one of more tokens if requests with `sampling` need it; `eos_ids` are the model's own stop tokens."""
        stop_ids = len(all_stop_ids(sampling, eos_ids))
        return Room(_grown(self.stop_ids, stop_ids), _grown(self.logit_bias, len(sampling.logit_bias)))


def _grown(room: int, number: int) -> int:
    return room if number <= room else pow2_ceil(number)
