"""Small damage that must be found."""

import json
import random

import numpy as np


def one_byte_flipped(raw: bytes, rng: random.Random, *, before: int) -> bytes:
    """`raw` with a flipped bit in one of its first `before` bytes; no line ends elsewhere than before."""
    places = [place for place in range(before) if raw[place] not in b"\n"]
    place = rng.choice(places)
    flipped = raw[place] ^ 1
    return raw[:place] + bytes([flipped if flipped not in b"\n" else raw[place] ^ 2]) + raw[place + 1 :]


def one_record_altered(raw: bytes, rng: random.Random) -> bytes:
    """An output in which one token, or the last bit of one log-probability, is another."""
    lines = raw.splitlines(keepends=True)
    at = rng.choice([i for i, line in enumerate(lines) if json.loads(line)["token_ids"]])
    record = json.loads(lines[at])
    place = rng.randrange(len(record["token_ids"]))
    if rng.random() < 0.5:
        record["token_ids"][place] ^= 1
    else:
        record["logprobs"][place] = float(np.nextafter(np.float32(record["logprobs"][place]), np.float32(-np.inf)))
    lines[at] = json.dumps(record).encode() + b"\n"
    return b"".join(lines)
