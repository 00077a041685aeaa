"""A copy of the weights at work: who is in which place of its device, which plans it has, and the segment that runs there."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from detspec.draft.source import Drafter
from detspec.engine.agreement import Agreement
from detspec.engine.certify import certified_passes
from detspec.engine.certify_mesh import mesh_of_bits
from detspec.engine.conformance import check_conformance
from detspec.engine.decide import Segment, decide
from detspec.engine.device import Device, check_alive
from detspec.engine.planner import Planner
from detspec.engine.policy import Needs, Plan, Room, needed_batches
from detspec.engine.preparation import Preparation
from detspec.engine.request import FAILED, Update
from detspec.engine.scheduler import PagePool, Scheduler
from detspec.engine.segments import Segments
from detspec.engine.sequence import NOT_OF_ONE, SequenceState, failed, wants_replay
from detspec.mesh import Place, put
from detspec.schedule import Schedule


@dataclasses.dataclass
class Traffic:
    """Requests that come into an engine, and news that go out of it; all its replicas share it.

    Attributes:
        room: how many stop tokens and biased tokens samples so far need.
        inbox: new samples, ids to abort, outboxes that were left; any thread may append.
        queue: samples that wait for a place, the next one first.
        news: sequences whose updates are still to be made.
    """

    room: Room
    inbox: deque[SequenceState | str | deque[Update]] = dataclasses.field(default_factory=deque)
    queue: deque[SequenceState] = dataclasses.field(default_factory=deque)
    news: list[SequenceState] = dataclasses.field(default_factory=list)


class Replica:
    """A device with the sequences in its places.

    Attributes:
        device: weights, state and programs.
        planner: the replica's plans, with their times.
        preparation: which plans it gets when.
        scheduler: places and pages, and the queue of all replicas.
        sequences: sequences that have a place here, the oldest first.
        pool: the replica's cache pages.
        mesh: facts on the replica's chips for fingerprints.
        differs: first difference of their bits from those of one chip; "" if there is none.
        num_tokens: tokens that all its segments so far have committed.
    """

    def __init__(self, device: Device, agreement: Agreement, traffic: Traffic) -> None:
        """Compares several chips with one."""
        config = device.config
        self.device = device
        self.planner = Planner(device, agreement)
        self.preparation = Preparation(device, self.planner, self.empty)
        self.pool = PagePool(device.num_pages)
        self.num_tokens = 0
        reader = device.reader
        self.scheduler = Scheduler(
            self.pool,
            traffic.queue,
            page=device.schedule.numerics.page,
            shape=(config.max_requests, device.max_pages),
            sharing=config.prefix_sharing and device.shares_pages,
            window=device.schedule.budget.window,
            passes_fn=None if reader is None else partial(reader.passes, device.model.cfg),
        )
        self.sequences = self.scheduler.sequences
        self._agreement = agreement
        self._traffic = traffic
        self._segments = Segments(device, agreement.observer(self.planner.step_times), self.planner.acceptance)
        self._batch = 0  # the smallest batch that holds the sequences of the segment on the device
        self._is_running = False  # a segment is on the device
        self._large: Schedule | None = None  # schedule of passes over records; None until it is certified
        self.mesh, self.differs = mesh_of_bits(device)

    @property
    def in_flight(self) -> list[SequenceState]:
        """Sequences that have a place here, or whose given texts are read."""
        return [*(self._segments.being_read if self._segments.scorings else ()), *self.sequences]

    @property
    def large(self) -> Schedule:
        """The schedule of passes over records: large ones, if this device certifies that their bits are the anchor's."""
        return self._large or self.device.schedule

    def prepare_replays(self) -> None:
        """Compiles the passes over records, and certifies large ones."""
        if self._large is None:
            self.empty()
            self._large = certified_passes(self.device)

    def collect(self) -> None:
        """Waits for the segment on the device, if there is one; sequences that have ended give their places back."""
        if not self._is_running:
            return
        self._is_running = False
        self._take_read(0)  # else the segment would seem to have taken their time
        num_passes, num_tokens = self._segments.wait()
        self.preparation.observed(self._batch, num_passes)
        self.num_tokens += num_tokens
        ended: list[SequenceState] = []
        for sequence in tuple(self.sequences):
            with self._alone(sequence):
                self.scheduler.register(sequence)
                if sequence.streamed or sequence.finish_reason or sequence.request.sampling.stop:
                    self._segments.fetch(sequence)
                    sequence.end_at_stop_string()
                if sequence.finish_reason:
                    ended.append(sequence)
                elif sequence.streamed:
                    self._traffic.news.append(sequence)
        self._traffic.inbox.extend(self._agreement.finished([*self.in_flight, *self._traffic.queue]))
        to_replay = [sequence for sequence in ended if wants_replay(sequence.request)]
        if to_replay:
            page_table = self.scheduler.page_table
            self._together(lambda some: self._segments.replay(some, page_table), to_replay)
        for sequence in ended:
            if sequence.place is not None:  # else it has failed
                with self._alone(sequence):
                    self._end(sequence, keep=sequence.finish_reason != FAILED)

    def go_on(self, others: Sequence["Replica"] = ()) -> None:
        """Gives places to sequences of the queue, as far as they should not go to one of `others`, and starts a segment.

        Raises `InputError` if there are sequences, but no longer the weights, or the device has other integers than all others.
        """
        if self.scheduler.all:
            check_alive(self.device.model.params)
            check_conformance(self.device)
        self._make_room()
        share = self._share(others)
        self._prepare(share)
        self._admit(share, others)
        num_started = self._read_given()
        if self.sequences:
            self._start()
        self._take_read(num_started)
        if not self.sequences:
            self._segments.rest()

    def _make_room(self) -> None:
        """Gives programs the room that samples need."""
        if self._traffic.room != self.device.room:
            self.empty()
            self.device.widen(self._traffic.room)
            self._large = None
            self.preparation.for_other_room()

    def _prepare(self, share: int) -> None:
        """Makes the programs that up to `share` of the samples in places or in the queue need."""
        if any(sequence.request.replays for sequence in self._traffic.queue):
            self.prepare_replays()
        some = [sequence for sequence in self.scheduler.all if not sequence.is_given]
        if some and share:
            needs = Needs.of([sequence.request.sampling for sequence in some])
            needs = needs._replace(processing=any(sequence.request.needs_processing for sequence in some))
            self.preparation.for_requests(min(len(some), share), needs, is_running=bool(self.sequences))

    def _admit(self, share: int, others: Sequence["Replica"]) -> None:
        """Gives places to sequences of the queue until it has `share` of them."""
        admitted = self.scheduler.admit(self._alone, most=share, others=[other.scheduler for other in others])

        def put(some: Sequence[SequenceState]) -> None:
            self._segments.admit([each for each in admitted if each.sequence in some])

        if admitted:
            self._together(put, [each.sequence for each in admitted])

    def _share(self, others: Sequence["Replica"]) -> int:
        """Most sequences that are to be in places here, so that all replicas have about as many."""
        num_sequences = len(self.scheduler.all) + sum(len(other.sequences) for other in others)
        return -(-num_sequences // (1 + len(others)))

    def rest(self) -> None:
        """Ends a segment that no sequence takes part in any more."""
        if not self.sequences:
            self.collect()
            if not self.in_flight:  # else nobody would read what is being read
                self._take_read(0)
            self._segments.rest()

    def empty(self) -> None:
        """Takes all sequences out of their places, to go on to the same bits later: trial runs need all places and pages."""
        self.collect()
        while self.sequences:
            self._preempt()
        self.pool.clear()

    def abort(self, sequence: SequenceState) -> None:
        """Ends `sequence`, in flight here or in the queue, with what it has committed; of a given text that is nothing."""
        with self._alone(sequence):
            is_read = sequence in self._segments.being_read
            self._segments.fetch(sequence)
            sequence.abort()
            if is_read:
                self._traffic.news.append(sequence)
            else:
                self._end(sequence, keep=False)

    def drop(self, is_meant: Callable[[SequenceState], bool]) -> None:
        """Takes out all sequences that `is_meant` accepts, in flight here or in the queue, without an update."""
        self.scheduler.take_out(is_meant)
        for sequence in filter(is_meant, self._segments.being_read):
            sequence.abort()

    def stop(self) -> None:
        """Waits for all that is on the device."""
        self.collect()
        self._take_read(0)

    def fail(self, sequence: SequenceState, error: Exception) -> None:
        """Ends `sequence` and nothing else with `error`."""
        if sequence in self.scheduler.all:
            self.scheduler.remove(sequence, keep=False)
        self._traffic.news[:] = [other for other in self._traffic.news if other is not sequence]
        sequence.outbox.append(failed(sequence, error))

    def _read_given(self) -> int:
        """Starts passes over given texts, whose places and pages are free at once: what uses them next runs after these passes.

        Returns how many times such passes were started.
        """
        given = [sequence for sequence in self.sequences if sequence.is_given]
        if not given:
            return 0
        before = len(self._segments.scorings)
        in_places = tuple(self.sequences)
        page_table = self.scheduler.page_table
        self._together(lambda some: self._segments.start_reading(some, in_places, page_table, self.large), given)
        for sequence in given:
            if sequence.place is not None:  # else it has failed
                with self._alone(sequence):
                    sequence.read_given()
                    self.scheduler.register(sequence)
                    self.scheduler.remove(sequence, keep=True)
        return len(self._segments.scorings) - before

    def _take_read(self, but: int) -> None:
        """Waits for passes over given texts, but for the last `but` that were started: so the device always has work."""
        number = len(self._segments.scorings) - but
        for sequence, found in self._segments.read(number) if number else ():
            with self._alone(sequence):
                sequence.take(found)
                self._traffic.news.append(sequence)

    def _start(self) -> None:
        """Starts a segment over all sequences in places; does not wait for it."""
        page_table = self.scheduler.page_table
        plan, segment = self._plan()
        [self._batch] = needed_batches(self.device.config, len(self.sequences))
        self._agreement.started(plan, segment, self.sequences, page_table)
        self._segments.start(plan, segment, self.sequences, page_table)
        self._is_running = True

    def _plan(self) -> tuple[Plan, Segment]:
        """The next plan and how long to run it, with pages reserved; sequences that they do not last for are preempted."""
        config = self.device.config
        while True:
            load = self.scheduler.load()
            facts = self.planner.facts(self._agreement.visit_s(self.device.clock.visit_s))
            decision = decide(load, facts, config, self.device.schedule.budget)
            if decision is None:
                raise self.planner.refusal(load)
            segment = self.scheduler.reserve(decision.segment, decision.plan.most_tokens)
            if segment is not None:
                facts.times.started(decision.plan)
                return decision.plan, segment
            self._preempt()

    def _preempt(self) -> None:
        """Takes the youngest sequence out of its place, to go on later."""
        youngest = self.sequences[-1]
        with self._alone(youngest):
            self._segments.fetch(youngest)
            self.scheduler.preempt()

    def _end(self, sequence: SequenceState, *, keep: bool) -> None:
        """Takes back the place and pages of a sequence that has ended; with `keep` its pages stay cached."""
        self.scheduler.remove(sequence, keep=keep)
        self._traffic.news.append(sequence)

    @contextlib.contextmanager
    def _alone(self, sequence: SequenceState) -> Iterator[None]:
        """Lets an error inside end `sequence` and nothing else, unless it is no fault of one request."""
        try:
            yield
        except NOT_OF_ONE:
            raise
        except Exception as error:
            self.fail(sequence, error)

    def _together(self, act: Callable[[Sequence[SequenceState]], None], sequences: Sequence[SequenceState]) -> None:
        """Calls `act` with all `sequences` or, if that raises, with each by itself: those fail for which it raises again."""
        try:
            act(sequences)
        except NOT_OF_ONE:
            raise
        except Exception:
            for sequence in sequences:
                with self._alone(sequence):
                    act([sequence])


def drafters_at(place: Place, drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """`drafters` with their weights at `place`."""
    return {name: drafter._replace(params=put(drafter.params, place)) for name, drafter in drafters.items()}
