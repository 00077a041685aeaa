"""A clock that is wrong by a factor of up to 100 either way, another one each time that it is looked at."""

import random
import time


class SkewedClock:
    """Takes the place of the module `time` where times are measured."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._real_s = time.perf_counter()
        self._s = 0.0

    def perf_counter(self) -> float:
        real_s = time.perf_counter()
        self._s += (real_s - self._real_s) * 100 ** self._random.uniform(-1, 1)
        self._real_s = real_s
        return self._s
