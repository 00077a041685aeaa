"""The loop of an engine: requests come in, run on one or several replicas of a model, and go out as updates.

1. `take_in` queues new samples, and ends those that were aborted or left.
2. Each replica collects its segment: what has ended gives its place and pages back.
3. It admits samples from the queue that all share, and starts the next segment.
4. While its device works, `hand_out` puts the updates of the segment before together.

`drive` calls it with requests from anywhere: two rounds of places are in flight, so that a place which gets free is filled.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from detspec.checkpoint.load import Model
from detspec.engine.agreement import Agreement
from detspec.engine.device import Device
from detspec.engine.replica import Replica, Traffic
from detspec.engine.request import Request, Update
from detspec.engine.sequence import NOT_OF_ONE, SequenceState, update_of
from detspec.errors import InputError
from detspec.riders.counters import Stats
from detspec.riders.riding import brought

ROUNDS = 2
IDLE_S = 1e-4  # between two looks at an iterator while nothing is in flight


class Loop:
    """The replicas of a model, and the requests that they share.

    Attributes:
        replicas: copies of the weights, each with a device, places, pages and plans of its own.
        outbox: updates of requests that came without an outbox.
        stats: counts of speculation for all requests that have ended so far, aborted ones too.
        is_stepping: a step is under way.
    """

    def __init__(self, devices: Sequence[Device], agreement: Agreement) -> None:
        """Compares several chips with one; raises `InputError` if the devices have bits of their own each."""
        self.outbox: deque[Update] = deque()
        self.stats = Stats()
        self.is_stepping = False
        self._traffic = Traffic(devices[0].room)
        self._digest = ""
        self.replicas = tuple(Replica(device, agreement, self._traffic) for device in devices)
        self._others = [[other for other in self.replicas if other is not each] for each in self.replicas]
        mesh = self.replicas[0].mesh
        for number, replica in enumerate(self.replicas):
            if replica.differs:
                warnings.warn(
                    f"on these chips bits are not those of one chip, and results say so (mesh {replica.mesh!r}): "
                    f"{replica.differs}",
                    stacklevel=4,
                )
            if replica.mesh != mesh:
                raise InputError(
                    f"replica {number} has mesh {replica.mesh!r}, replica 0 has mesh {mesh!r}: their bits differ, so use one "
                    "replica"
                )

    @property
    def model(self) -> Model:
        """The model that runs, as the first replica has it."""
        return self.replicas[0].device.model

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do, or updates to return."""
        traffic = self._traffic
        return bool(traffic.inbox or traffic.queue or traffic.news or self.outbox or self.num_live)

    @property
    def num_live(self) -> int:
        """Samples that have a place on a device, or whose given texts are read there."""
        return sum(len(replica.in_flight) for replica in self.replicas)

    def add(self, request: Request, *, stream: bool, outbox: deque[Update] | None) -> None:
        """Queues the samples of a checked `request`; any thread may call it.

        Raises `InputError` if it brings a value that no rider takes.
        """
        outbox = self.outbox if outbox is None else outbox
        says = brought(self.replicas[0].device.riders, request)
        token_bytes = self.model.token_bytes
        self._traffic.inbox.extend([SequenceState(each, token_bytes, outbox, stream, says) for each in request.samples()])

    def end(self, whose: str | deque[Update]) -> None:
        """Ends requests at the next step: aborts those of an id, or drops those of an outbox; any thread may call it."""
        self._traffic.inbox.append(whose)

    def step(self) -> None:
        """Collects a segment of each replica, starts its next, and makes updates while its device works."""
        self.is_stepping = True
        try:
            for replica, others in zip(self.replicas, self._others, strict=True):
                replica.collect()
                self.take_in()
                replica.go_on(others)
                self._hand_out()
        finally:
            self.is_stepping = False

    def stop(self) -> None:
        """Waits for all that is on the devices, makes its updates, and drops all requests."""
        for replica in self.replicas:
            replica.stop()
        self.take_in()
        self._hand_out()
        for replica in self.replicas:
            replica.drop(lambda sequence: True)
            replica.rest()

    def take_in(self) -> None:
        """Queues what was added, and ends what was aborted or left by its driver, in the order of the calls."""
        traffic = self._traffic
        while traffic.inbox:
            item = traffic.inbox.popleft()
            if isinstance(item, SequenceState):
                traffic.queue.append(item)
                traffic.room = traffic.room.with_room_for(item.request.sampling, self.model.eos_ids)
            elif isinstance(item, str):
                for sequence in [*(each for replica in self.replicas for each in replica.in_flight), *traffic.queue]:
                    if sequence.request.id == item:
                        self._replica_of(sequence).abort(sequence)
            else:
                for replica in self.replicas:
                    replica.drop(lambda sequence, outbox=item: sequence.outbox is outbox)  # type: ignore[misc]
        for replica in self.replicas:
            replica.rest()

    def on_each(self, act: Callable[[Replica], None]) -> None:
        """Calls `act` with each replica; several compile at the same time."""
        if len(self.replicas) == 1:
            act(self.replicas[0])
            return
        with ThreadPoolExecutor(len(self.replicas), thread_name_prefix="prepare") as threads:
            list(threads.map(act, self.replicas))

    def name_weights(self, digest: str) -> None:
        """Says what bits depend on from now on, besides requests; what pages hold is forgotten."""
        self._digest = digest
        for replica in self.replicas:
            replica.pool.clear(bytes.fromhex(digest))

    def _hand_out(self) -> None:
        """Puts the updates of all sequences that have news into their outboxes."""
        for sequence in dict.fromkeys(self._traffic.news):  # one that is streamed may have news, and be aborted then
            if sequence.finish_reason:
                self.stats += sequence.stats
            try:
                sequence.outbox.append(update_of(sequence, self.model, self._digest))
            except NOT_OF_ONE:
                raise
            except Exception as error:
                self._replica_of(sequence).fail(sequence, error)
        self._traffic.news.clear()

    def _replica_of(self, sequence: SequenceState) -> Replica:
        """The replica where `sequence` is; the first one if it waits."""
        return next((replica for replica in self.replicas if sequence in replica.in_flight), self.replicas[0])


def drive(
    engine: Any, requests: Iterable[Request | None], *, stream: bool = False, outbox: deque[Update] | None = None
) -> Iterator[list[Update]]:
    """Yields the updates of one step of `engine` after another, until all `requests` have ended.

    It asks `requests` for more as places get free, so they may have no end. None stands for nothing at the moment: what is in
    flight goes on. An iterator that waits instead holds up the thread that drives the engine.

    `stream` and `outbox` are those of `Engine.add`: with an outbox of its own it sees its own updates alone.
    """
    source: Iterator[Request | None] | None = iter(requests)
    num_open = 0
    while True:
        while source is not None and num_open < ROUNDS * engine.num_places:
            try:
                request = next(source)
            except StopIteration:
                source = None
                break
            if request is None:
                break
            engine.add(request, stream=stream, outbox=outbox)
            num_open += request.sampling.n
        if source is None and not num_open:
            return
        updates = engine.step(outbox)
        num_open -= sum(update.completion is not None for update in updates)
        if not updates and not num_open:
            time.sleep(IDLE_S)
        yield updates
