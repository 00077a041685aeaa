"""The systems that `scripts/race.py` compares, one module each, and what they have in common.

A module `with_<system>` runs in the environment of its system, so it imports nothing of detspec (but for `with_detspec`). Its
`start(folder, limits, **options)` loads the model in `folder` and returns a `Generate`.
"""

import dataclasses
from collections.abc import Callable, Sequence

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], list[list[int]]]  # prompts of one length, number of new tokens -> new tokens, greedy


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes that a system makes room for."""

    max_requests: int
    max_len: int  # positions of a request, prompt and new tokens together
    num_threads: int
