"""Seeds for many samples: different ones where two samples would else share their noise."""

import hashlib
import operator


def seed_of(*names: int | str) -> int:
    """A seed, 0 .. 2**32-1, that depends on all of `names` and on their order, on nothing else.

    `SamplingParams.n` numbers the seeds of one prompt, so two prompts of one seed share their noise at every position. A batch
    that should not has `seed_of(run, step, prompt, sample)` for each sample, a harness `seed_of(seed, prompt, occurrence)`.

    Raises `TypeError` if a name is neither an integer nor a text.
    """
    parts = [name if isinstance(name, str) else operator.index(name) for name in names]
    return int.from_bytes(hashlib.sha256(ascii(parts).encode()).digest()[:4], "big")
