"""Workers with engines of chosen speeds, on a clock that does not wait: what takes minutes there takes a second here.

The engine counts up: token `i` after a prompt that ends in `t` is `(t + i) % 97`, with log-probability `-i / 64`. A step adds
one token to each request that has a place, and lasts `1 / speed` seconds. So a full engine of `places` places commits
`places * speed` tokens a second. The ideal time is that in which all engines together, while they run, commit all tokens.

    2 workers, 4 places, speeds 1 and 3, 1600 tokens   ->   16 tokens/s, ideal 100 s; if the fast one is killed after 50 s:
    800 tokens are left for 4 tokens/s, ideal 50 + 200 s

Each worker runs in a thread; one at a time, the one whose next moment is the earliest. A killed one is never woken, as after
SIGKILL: its files stay as they are.
"""

import dataclasses
import heapq
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from detspec.engine.agreement import Alone
from detspec.engine.engine_config import EngineConfig
from detspec.engine.intake import request_of
from detspec.engine.request import Completion, Request, Update, completion_digest
from detspec.jobs.chunk_folder import WorkerClock
from detspec.riders.counters import Stats
from tests.engine.byte_model import SCHEDULE
from tests.engine.fake_device import FAKE_MODEL


class PacedEngine:
    """Takes the place of an engine. `wrong` adds 1 to the last token of a request of this id: a fault of the machine."""

    def __init__(self, sleep: Callable[[float], None], *, places: int = 4, speed: float = 1.0, wrong: str = "") -> None:
        self.model = FAKE_MODEL
        self.config = EngineConfig(max_requests=places, max_len=64, schedule=SCHEDULE)
        self.schedule = SCHEDULE
        self.agreement = Alone()
        self.num_places = places
        self.num_tokens = 0
        self.acceptance_by_match_length: dict[int, float] = {}
        self.certificates: dict = {}
        self.num_added = 0
        self._sleep, self._speed, self._wrong = sleep, speed, wrong
        self._waiting: deque[Request] = deque()
        self._placed: list[list] = []  # request, tokens so far

    @property
    def num_live(self) -> int:
        return len(self._placed)

    def fingerprint(self) -> dict[str, object]:
        return {"model": self.model.digest, "schedule": self.schedule.bits()}

    def request(self, prompt, sampling, *, id="0") -> Request:
        return request_of(self.model, self.config, prompt, sampling, id=id)

    def prepare(self, num_requests, needs, *, first_only) -> tuple:
        return ()

    def add(self, request: Request, *, stream: bool = False, outbox: None = None) -> None:
        self.num_added += 1
        self._waiting.extend(request.samples())

    def step(self, outbox: None = None) -> list[Update]:
        while self._waiting and len(self._placed) < self.num_places:
            self._placed.append([self._waiting.popleft(), 0])
        if self._placed:
            self._sleep(1 / self._speed)
        ended = []
        for entry in self._placed:
            entry[1] += 1
            self.num_tokens += 1
            if entry[1] == entry[0].sampling.max_tokens:
                ended.append(self._completed(entry[0]))
        self._placed = [entry for entry in self._placed if entry[1] < entry[0].sampling.max_tokens]
        return ended

    def stop(self) -> list[Update]:
        self._waiting.clear()
        self._placed = []
        return []

    def _completed(self, request: Request) -> Update:
        numbers = range(1, request.sampling.max_tokens + 1)
        tokens = [(request.prompt_token_ids[-1] + i) % 97 for i in numbers]
        tokens[-1] += request.id == self._wrong
        logprobs = tuple(-i / 64 for i in numbers)
        digest = completion_digest(request, tuple(tokens), np.asarray(logprobs, np.float32), (), "counts up")
        facts = {"id": request.id, "index": request.index, "prompt_token_ids": request.prompt_token_ids, "text": ""}
        facts |= {"token_ids": tuple(tokens), "logprobs": logprobs, "finish_reason": "length", "digest": digest}
        return Update(request, (), (), "", Completion(**facts, stats=Stats()))


class Killed(BaseException):
    """Ends the thread of a worker that was killed, after the test."""


@dataclasses.dataclass
class _Life:
    """A worker in the world."""

    thread: threading.Thread
    turn: threading.Event = dataclasses.field(default_factory=threading.Event)
    is_over: bool = False
    is_killed: bool = False
    frozen_until: float = 0.0
    ended_at: float = 0.0


class World:
    """The clock, and whose turn it is.

    Attributes:
        now: seconds since the beginning.
        files: for each worker, the file that shows its life; it is fresh whenever the worker runs.
    """

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self._folder = folder
        self._lives: dict[str, _Life] = {}
        self._events: list[tuple[float, int, str | Callable[[], None]]] = []
        self._count = 0
        self._back = threading.Event()
        self._failed: list[BaseException] = []

    def add(self, name: str, work: Callable[[], object], *, at: float = 0.0) -> None:
        """A worker that begins at that time."""

        def run() -> None:
            life.turn.wait()
            try:
                work()
            except Killed:
                pass
            except BaseException as error:
                self._failed.append(error)
            life.is_over = True
            life.ended_at = self.now
            self._back.set()

        life = _Life(threading.Thread(target=run, daemon=True))
        self._lives[name] = life
        life.thread.start()
        self._at(at, name)

    def kill(self, name: str, at: float) -> None:
        self._at(at, lambda: setattr(self._lives[name], "is_killed", True))

    def freeze(self, name: str, begin: float, end: float) -> None:
        self._at(begin, lambda: setattr(self._lives[name], "frozen_until", end))

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._at(when, act)

    def run(self) -> Mapping[str, float]:
        """Until all workers have ended or are killed; when each ended."""
        while self._events:
            when, _, event = heapq.heappop(self._events)
            self.now = max(self.now, when)
            if not isinstance(event, str):
                event()
                continue
            life = self._lives[event]
            if life.is_killed:
                continue
            if life.frozen_until > self.now:
                self._at(life.frozen_until, event)
                continue
            alive = self._folder / f"{event}.alive"
            if alive.exists():
                os.utime(alive, (self.now, self.now))
            self._back.clear()
            life.turn.set()
            self._back.wait()
            if self._failed:
                raise self._failed[0]
        return {name: life.ended_at for name, life in self._lives.items() if life.is_over}

    def sleep(self, name: str, seconds: float) -> None:
        """Called by a worker: others run meanwhile."""
        life = self._lives[name]
        self._at(self.now + seconds, name)
        life.turn.clear()
        self._back.set()
        life.turn.wait()
        if life.is_killed:
            raise Killed

    def bury(self) -> None:
        """Ends the threads of those that were killed."""
        for life in self._lives.values():
            if not life.is_over:
                self._back.clear()
                life.turn.set()
                self._back.wait()

    def _at(self, when: float, event: str | Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))


class WorldClock(WorkerClock):
    """The world's time, as one worker sees it."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.sleep(self._name, seconds)

    def stamp(self, path: Path) -> float:
        path.write_bytes(b"\n")
        os.utime(path, (self._world.now, self._world.now))
        return self._world.now


def ideal_seconds(num_tokens: int, places: int, spans: list[tuple[float, float, float]]) -> float:
    """Seconds until engines commit `num_tokens`; `spans` are speed, begin and end of each time in which one of them runs."""
    moments = sorted({moment for _, begin, end in spans for moment in (begin, end)})
    left = float(num_tokens)
    for begin, end in itertools.pairwise(moments):
        rate = places * sum(speed for speed, first, last in spans if first <= begin and end <= last)
        if rate * (end - begin) >= left:
            return begin + left / rate
        left -= rate * (end - begin)
    raise ValueError("the engines end before the work does")
