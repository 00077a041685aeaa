"""The end of a text is decided by one function, on the device and in audits."""

import jax
import numpy as np

from detspec.generation.commit import ending
from detspec.state import LENGTH, NOT_FINITE, RUNNING, STOP

INF = np.inf


def test_texts_end_where_worked_examples_say():
    """Six texts, of four tokens each that may be taken but for the fifth, with room for four, but for the sixth."""
    stops = [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    logprobs = [[-1, -1, -1, -1], [-1, -1, -1, INF], [-1, INF, -1, -1], [-1, -1, INF, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]]
    found = ends(stops, logprobs, offered=[4, 4, 4, 4, 3, 4], room=[4, 4, 4, 4, 4, 9])
    assert found == ([4, 2, 1, 2, 3, 4], [LENGTH, STOP, NOT_FINITE, NOT_FINITE, RUNNING, RUNNING])


def ends(stops: list, logprobs: list, **numbers: list[int]) -> tuple[list[int], list[int]]:
    """Finds the end from arrays of numpy and, compiled, from those of jax."""
    arrays = np.asarray(stops, bool), np.asarray(logprobs, np.float32)
    counts = [np.asarray(number, np.int32) for number in numbers.values()]
    host, device = (tuple(np.asarray(part).tolist() for part in fn(*arrays, *counts)) for fn in (ending, jax.jit(ending)))
    assert host == device
    return host
