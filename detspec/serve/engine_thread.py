"""A thread that steps the engine, and all that the event loop asks of it.

1. `submit` checks that there is room, adds the requests of one HTTP call, and returns an `HttpCall`, which hands out updates.
2. The thread steps while there is work. After each step it hands all updates to the event loop at once.
3. `run_idle` runs a function in the thread between two steps, such as new weights.

Public methods but `later` belong to the event loop. The thread calls back by `call_soon_threadsafe` alone.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from detspec.engine.engine import Engine
from detspec.engine.request import Request, Update
from detspec.errors import InputError
from detspec.serve.calls import CallFailed, EngineStopped, HttpCall, QueueFull
from detspec.serve.metrics import Metrics

PAUSE_MODES = ("abort", "wait", "keep")
IDLE_S = 0.05  # longest sleep of the thread when nothing wakes it
POLL_S = 0.01  # between two looks of the event loop at something that ends soon
CLOSE_S = 10.0  # longest wait for the thread at the end


class EngineThread:
    """Steps an engine in a thread of its own.

    Attributes:
        engine: the engine; other threads may call its `add` and `abort`, and read its counts.
        max_waiting: most samples that may wait for a place.
        num_open: samples in flight.
        loop: the event loop, once started.
        is_ready: requests are answered: a program is certified that can run any of them, or they are to wait for theirs.
        is_paused: new calls wait.
        is_leaving: no further calls come, so nothing that would make them faster is tried.
        failure: why nothing is answered any more; None while all is well.
        on_ready: called once requests are answered.
        on_made: called each time that a further program was made while requests run, and `engine.compiling` became shorter.
        on_failure: called when nothing is answered any more.
    """

    def __init__(self, engine: Engine, *, max_waiting: int, metrics: Metrics, prepares: bool = True) -> None:
        """Starts nothing; `start` does.

        If it `prepares`, one program is made first and all others while requests run; else those that requests need, and
        while they run those that they have lacked for long.
        """
        self.engine = engine
        self.max_waiting = max_waiting
        self.num_open = 0
        self.is_ready = self.is_paused = self.is_leaving = False
        self.failure: EngineStopped | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_made: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self._metrics = metrics
        self._prepares = prepares
        self._calls: dict[str, HttpCall] = {}  # by the id of each request that has not ended
        self._numbers = itertools.count()
        self._wake = threading.Event()
        self._is_closing = False
        self._num_resumes = 0
        self._holds = False  # nothing is stepped, though there may be work
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Samples in flight that have no place."""
        return max(0, self.num_open - self.engine.num_live)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is in flight but calls that came while it was paused."""
        return all(call.is_held for call in self._calls.values())

    def start(self) -> None:
        """Compiles and certifies in the thread, and steps; the event loop must run."""
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    def next_id(self) -> str:
        """An id that no other call has."""
        return str(next(self._numbers))

    def submit(self, requests: Sequence[Request], *, stream: bool, arrive: Callable[[Update], Any]) -> HttpCall:
        """Adds the requests of one call, whose ids all differ; see `HttpCall`.

        Raises `QueueFull` if more samples would wait than may, `InputError` if there is never room for so many, and
        `EngineStopped` if the thread has ended.
        """
        self._check_runs()
        call = HttpCall(requests, streamed=stream, arrive=arrive)
        room = self.engine.num_places + self.max_waiting
        has = f"there is room for {self.engine.num_places} that run and {self.max_waiting} that wait"
        if call.num_samples > room:
            raise InputError(f"the call asks for {call.num_samples} samples, and {has}: ask for fewer")
        if self.num_open + call.num_samples > room:
            raise QueueFull(
                f"{self.num_open} samples are in flight, the call asks for {call.num_samples}, and {has}: come again"
            )
        self.num_open += call.num_samples
        self._calls |= dict.fromkeys(call.left, call)
        call.is_held = self.is_paused
        if not call.is_held:
            self._add(call)
        return call

    def abort(self, call: HttpCall) -> None:
        """Ends what is open of `call` with the next step, or at once if it is held."""
        for id in list(call.left):
            if call.is_held:
                self._forget(id)
            else:
                self.engine.abort(id)
        self._wake.set()

    async def pause(self, mode: str) -> None:
        """New calls wait from now on. What is in flight is aborted, waited for, or kept where it is, as `mode` says.

        Returns early if another call resumes meanwhile.
        """
        self.is_paused = True
        num_resumes = self._num_resumes
        self._holds = mode == "keep"
        if mode == "abort":
            for call in self._open(held=False):
                self.abort(call)
        while mode != "keep" and num_resumes == self._num_resumes and not self.is_quiet:
            self._check_runs()
            await asyncio.sleep(POLL_S)

    def resume(self) -> None:
        """Goes on with what was kept, and with the calls that came in the meantime."""
        self.is_paused = self._holds = False
        self._num_resumes += 1
        for call in self._open(held=True):
            call.is_held = False
            self._add(call)
        self._wake.set()

    async def run_idle(self, task: Callable[[], Any]) -> Any:
        """Runs `task` in the thread between two steps; returns what it returns, and raises what it raises."""
        self._check_runs()
        future: Future[Any] = Future()
        self._tasks.append((task, future))
        self._wake.set()
        return await asyncio.wrap_future(future)

    def abort_all(self) -> None:
        """Ends all that has begun with what it has, and all that has not with an error."""
        self._holds = False  # else what is kept would not end
        for call in self._open(held=False):
            self.abort(call)
        for call in self._open(held=True):
            call.fail(EngineStopped("the server ended before the call began"))

    def end_calls(self, why: EngineStopped) -> None:
        """Ends all calls with `why` in place of what is still to come."""
        for call in dict.fromkeys(self._calls.values()):
            call.fail(why)

    def fail(self, failure: EngineStopped) -> None:
        """Answers nothing from now on."""
        if self.failure is None:
            self.failure = failure
            self.on_failure()
        self.end_calls(self.failure)

    async def close(self) -> None:
        """Drops what is in flight, and waits for the thread to end; not for long, since it may be compiling."""
        self._is_closing = True
        self._wake.set()
        deadline = time.monotonic() + CLOSE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def later(self, fn: Callable[..., None], *args: object) -> None:
        """Calls `fn` in the event loop, after what came before: updates, and the results of tasks. For the thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(fn, *args)

    def _add(self, call: HttpCall) -> None:
        for request in call.requests:
            try:
                self.engine.add(request, stream=call.streamed)
            except Exception as error:
                self._forget(request.id)
                call.fail(error)
        self._wake.set()

    def _check_runs(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _open(self, *, held: bool) -> list[HttpCall]:
        """The calls in flight that a pause holds, or those that it does not."""
        return [call for call in dict.fromkeys(self._calls.values()) if call.is_held == held]

    def _forget(self, id: str) -> None:
        """Drops request `id`, of which nothing more comes."""
        self.num_open -= self._calls.pop(id).left.pop(id)

    def _run(self) -> None:
        """Steps the engine until the server ends; in the thread."""
        try:
            if self._prepares:
                self.engine.prepare_behind()
            else:
                self.engine.compile_behind()
            self.later(self._prepared)
            while not self._is_closing:
                self._run_tasks()
                if not (self._holds or self.is_leaving) and self.engine.go_on_preparing():
                    self.later(lambda: self.on_made())
                if self._holds or not self.engine.has_work:
                    self._wake.wait(IDLE_S)
                    self._wake.clear()
                    continue
                try:
                    updates = self.engine.step()
                except InputError as error:  # no program is certified for deterministic requests
                    self.later(self._refuse, str(error))
                    time.sleep(IDLE_S)  # until they are aborted
                    continue
                if updates:
                    self.later(self._deliver, updates)
            self.engine.stop()
        except BaseException as error:
            self.later(self.fail, EngineStopped(f"the engine has ended: {error!r}"))
            raise

    def _run_tasks(self) -> None:
        while self._tasks:
            task, future = self._tasks.popleft()
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)

    def _prepared(self) -> None:
        self.on_ready()
        self.is_ready = True

    def _deliver(self, updates: Sequence[Update]) -> None:
        """Hands updates to their calls; in the event loop."""
        now = time.monotonic()
        for update in updates:
            id = update.request.id
            call = self._calls[id]
            sample = id, update.request.index
            since_last = now - call.last[sample] if sample in call.last else None
            self._metrics.observe(update, since_call=now - call.began, since_last=since_last, streamed=call.streamed)
            call.last[sample] = now
            if update.completion is not None:
                self.num_open -= 1
                call.left[id] -= 1
                if not call.left[id]:
                    self._forget(id)
            call.deliver(update)

    def _refuse(self, why: str) -> None:
        """Ends deterministic requests that cannot run; in the event loop."""
        for call in self._open(held=False):
            if any(request.sampling.deterministic for request in call.requests):
                self.abort(call)
                call.fail(CallFailed(why))
