"""Segments of steps on the device: the host starts one, goes on with its own work, and then reads what it brought."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from detspec.cache import SCRATCH_PAGE
from detspec.engine.decide import Acceptance, Observe, Segment
from detspec.engine.device import Device, GivenText
from detspec.engine.policy import Plan
from detspec.engine.programs import Placement, Report, SequenceProgress
from detspec.engine.request import Likeliest, Replay
from detspec.engine.scheduler import Admitted
from detspec.engine.sequence import SequenceState, asked_from, wants_replay
from detspec.generation import score
from detspec.generation.loop import NEVER, Limits
from detspec.riders.counters import Stats
from detspec.riders.rider import Entry
from detspec.riders.riding import reader_of
from detspec.schedule import Schedule

CHECKED_EVERY = 256  # so many reports: then the copies on all chips are compared


class Running(NamedTuple):
    """A segment on the device, its sequences in the order of its reports."""

    plan: Plan
    sequences: tuple[SequenceState, ...]
    prefill_passes: int  # at most
    answers: bool  # they committed the token after each prompt
    rounds: Report | None  # after passes over prompts, or the last round of them and a step
    steps: Report | None  # after the steps alone

    @property
    def last(self) -> Report:
        """Report at its end."""
        report = self.steps or self.rounds
        assert report is not None
        return report


class Scoring(NamedTuple):
    """Given texts on the device, and what will be known of them."""

    sequences: tuple[SequenceState, ...]
    places: tuple[int, ...]  # which they had when it was started
    found: score.Replayed
    told: jax.Array | None  # [B, ...], what the rider that reads prompts reports, if it read some of them


class Segments:
    """Starts one segment after another and waits for each; what they take and accept is told to the planner's estimates."""

    def __init__(self, device: Device, observed: Observe, acceptance: Acceptance) -> None:
        """`observed` is told the seconds of the steps of each segment, where they are known."""
        self._device = device
        self._observed = observed
        self._acceptance = acceptance
        self._running: Running | None = None
        self._is_started = False  # the segment `_running` is on the device
        self.scorings: deque[Scoring] = deque()  # scorings of given texts, in the order in which they were started
        self._num_reports = 0

    def admit(self, admitted: Sequence[Admitted]) -> None:
        """Copies the pages that sequences begin with, and puts them into their places when the next segment starts."""
        entries = [self._entry(each.sequence) for each in admitted if not each.sequence.is_given]
        self._device.put(entries)
        for copies in apart([one.copy for one in admitted if one.copy[0] != SCRATCH_PAGE]):
            self._device.copy(copies)

    def start(self, plan: Plan, segment: Segment, sequences: Sequence[SequenceState], page_table: np.ndarray) -> None:
        """Starts a segment over `sequences`, all that have a place, and does not wait for it."""
        device = self._device
        assert plan.processing or not any(sequence.request.needs_processing for sequence in sequences)
        placement = _placement(sequences, page_table, plan.batch)

        def step(num_steps: int) -> Report:
            limits = Limits(num_steps, segment.min_live, segment.max_idle, segment.max_gain)
            return device.step(plan, placement, limits)

        nobody_waits = all(sequence.behind for sequence in sequences)  # then one round reads all prompts
        prefill = partial(device.prefill_all if nobody_waits else device.prefill, answers=segment.answers)
        rounds = steps = None
        if not segment.rounds and segment.prefill_passes:
            rounds = prefill(placement, segment.prefill_passes)
        elif not segment.rounds and device.waits:
            device.prefill(placement, 0)  # they share all that they need
        for _ in range(segment.rounds):
            prefill(placement, segment.prefill_passes)
            rounds = step(1)
        if segment.steps:
            steps = step(segment.steps)
        self._running = Running(plan, tuple(sequences), segment.num_prefill_passes, segment.answers, rounds, steps)
        self._is_started = True

    def start_reading(
        self, sequences: Sequence[SequenceState], in_places: Sequence[SequenceState], page_table: np.ndarray, large: Schedule
    ) -> None:
        """Starts the passes over the given texts of `sequences`, some of those `in_places`; does not wait for them.

        They read from what their pages hold on. Targets alone are found in passes of the schedule `large`.
        """
        device = self._device
        is_read = any(sequence.brought.is_read for sequence in sequences)
        says_likeliest = any(wants_replay(each.request) or not each.request.replays for each in sequences)
        schedule = device.schedule if says_likeliest else large
        entries = [self._entry(sequence) for sequence in sequences]
        reads_first = is_read or not says_likeliest  # passes that say nothing need no logits
        if reads_first:
            device.put(entries)
            device.prefill(_placement(in_places, page_table, len(in_places)), NEVER, schedule=schedule)
            entries = []
        texts: dict[int, GivenText] = {}
        for sequence in sequences:
            assert sequence.place is not None
            wanted_from = asked_from(sequence.request)
            known = sequence.prompt_len - 1 if reads_first else sequence.length
            start = known if sequence.brought.is_read else min(known, max(0, wanted_from - 1))
            texts[sequence.place] = GivenText([*sequence.tokens, *sequence.request.given_token_ids], start, wanted_from)
        placement = _placement(sequences, page_table, len(sequences))
        asked = self._asked(sequences, says_likeliest=says_likeliest)
        found = device.replay(placement, texts, asked, entries=entries, schedule=schedule)
        told = device.told() if is_read else None
        self.scorings.append(Scoring(tuple(sequences), tuple(texts), found, told))

    @property
    def being_read(self) -> list[SequenceState]:
        """Sequences whose given texts are read, and that have not ended."""
        return [each for scoring in self.scorings for each in scoring.sequences if not each.finish_reason]

    def read(self, number: int) -> list[tuple[SequenceState, Replay | Likeliest]]:
        """Waits for the `number` scorings that were started first; what was found of each sequence that has not ended."""
        found: list[tuple[SequenceState, Replay | Likeliest]] = []
        for _ in range(number):
            scoring = self.scorings.popleft()
            said = jax.device_get((scoring.found, scoring.told))
            self._device.clock.lap()
            for sequence, place in zip(scoring.sequences, scoring.places, strict=True):
                if not sequence.finish_reason:
                    found.append((sequence, self._found(sequence, place, *said)))
        if not self._is_started and not self.scorings:
            self._device.clock.free()
        return found

    def wait(self) -> tuple[int, int]:
        """Waits for the segment that was started last, and updates its sequences.

        Returns how many steps and passes over prompts the segment took, at most, and how many tokens it committed.
        """
        clock = self._device.clock
        running = self._running
        if running is None or not self._is_started:
            clock.free()
            return 0, 0
        self._is_started = False
        was_seen = True
        num_passes = running.prefill_passes
        for report in filter(None, (running.rounds, running.steps)):
            was_seen &= not report.is_ready  # what had ended before the host looked took an unknown time
            progress = report.progress
            if self._num_reports % CHECKED_EVERY == 0:
                self._device.check_copies(report)
            self._num_reports += 1
            seconds = clock.lap()
            num_passes += int(progress.steps[0])
        clock.free()
        num_steps = int(progress.steps[0])
        if num_steps:
            is_known = running.steps is not None and was_seen and seconds > 0  # else the clock was set back
            self._observed(running.plan, seconds / num_steps if is_known else 0.0, num_steps)
        return num_passes, self._update(running, progress)

    def fetch(self, sequence: SequenceState) -> None:
        """Brings what `sequence` knows of itself, tokens and what a rider found, up to what it has committed."""
        if self._running is None or sequence not in self._running.sequences:
            return
        report = self._running.last
        place = self._running.sequences.index(sequence)
        told = [] if report.told is None else self._told(sequence, np.asarray(report.told)[place], sequence.length)
        sequence.extend(np.asarray(report.tokens)[place], np.asarray(report.logprobs)[place], told)

    def replay(self, sequences: Sequence[SequenceState], page_table: np.ndarray) -> None:
        """Replays the texts of `sequences`, still in their places, for the likeliest tokens, or the prompt's."""
        texts: dict[int, GivenText] = {}
        for sequence in sequences:
            assert sequence.place is not None
            wanted_from = asked_from(sequence.request)
            texts[sequence.place] = GivenText(sequence.tokens, max(0, wanted_from - 1), wanted_from)
        placement = _placement(sequences, page_table, len(sequences))
        found = jax.device_get(self._device.replay(placement, texts, self._asked(sequences, says_likeliest=True)))
        for sequence in sequences:
            if sequence.place is not None:
                sequence.found = _likeliest(found, sequence.place)
        self._device.clock.free()

    def rest(self) -> None:
        """No segment is in flight: time until the next one is not counted, unless texts are read."""
        self._running = None
        if not self.scorings:
            self._device.clock.stop()

    def _asked(self, sequences: Sequence[SequenceState], *, says_likeliest: bool) -> score.Asked:
        """Facts that passes are to say: targets of records, and at least as many of the likeliest tokens as is asked for."""
        asked = [sequence.request.sampling for sequence in sequences]
        processing = any(sequence.request.needs_processing for sequence in sequences)
        choose = any(sequence.request.replays for sequence in sequences)
        if not says_likeliest:
            return score.Asked(processing, choose, top_k=0)
        most = max(max(sampling.logprobs, sampling.prompt_logprobs or 0) for sampling in asked)
        return score.Asked.likeliest(processing, most, self._device.model.cfg.vocab_size)._replace(choose=choose)

    def _found(self, sequence: SequenceState, place: int, found: score.Replayed, told: np.ndarray | None) -> Replay | Likeliest:
        """Facts about the given text of `sequence`."""
        likeliest = _likeliest(found, place)
        if not sequence.request.replays:
            return likeliest
        given = slice(sequence.prompt_len, sequence.committed)
        new = slice(sequence.prompt_len, sequence.committed + 1)
        return Replay(
            targets=np.asarray(found.targets)[place, new],
            logprobs=np.asarray(found.target_logprobs)[place, new],
            given_logprobs=np.asarray(found.logprobs)[place, given],
            likeliest=likeliest if wants_replay(sequence.request) else None,
            thoughts=[] if told is None else self._told(sequence, told[place], sequence.prompt_len),
        )

    def _told(self, sequence: SequenceState, told: np.ndarray, length: int) -> list[Any]:
        """Facts that the reading rider `told` of the first `length` positions of `sequence`."""
        reader = self._device.reader
        if reader is None or not sequence.brought.is_read:
            return []
        return reader.found(self._device.model.cfg, told, sequence.prompt_len, length)

    def _entry(self, sequence: SequenceState) -> Entry:
        """`sequence` as it goes into its place."""
        assert sequence.place is not None
        brings = dict(sequence.request.brings)
        if sequence.told and (rider := reader_of(self._device.riders)) is not None:
            brings[rider.name] = sequence.told
        return Entry(
            place=sequence.place,
            tokens=sequence.tokens,
            sampling=sequence.request.sampling,
            prompt_len=sequence.prompt_len,
            logprobs=sequence.logprobs,
            length=sequence.length,
            brings=brings,
        )

    def _update(self, running: Running, progress: SequenceProgress) -> int:
        """Tells the sequences how far they are, and the planner what drafts brought."""
        facts = zip(progress.committed.tolist(), progress.length.tolist(), progress.finish.tolist(), strict=True)
        counted = progress.counts.tolist()
        num_tokens = windows = accepted = 0
        for sequence, (committed, length, finish), counters in zip(running.sequences, facts, counted, strict=False):
            stay = Stats(*counters)
            num_tokens += committed - sequence.committed
            windows -= running.answers and sequence.behind > 0 and committed > sequence.committed  # the answer's had no drafts
            windows += stay.num_verify_passes - sequence.stay.num_verify_passes
            accepted += stay.num_accepted_draft_tokens - sequence.stay.num_accepted_draft_tokens
            sequence.went_on(committed, length, finish, stay)
        self._acceptance.observed(running.plan, windows, accepted)
        return num_tokens


def _likeliest(found: score.Replayed, place: int) -> Likeliest:
    """Facts about the text in one place, in numpy."""
    return found.logprobs[place], found.top_ids[place], found.top_logprobs[place]  # type: ignore[return-value]


def _placement(sequences: Sequence[SequenceState], page_table: np.ndarray, batch: int) -> Placement:
    """The places of `sequences`, and free ones up to `batch`; the page table is copied, because the host changes it."""
    places = [sequence.place for sequence in sequences if sequence.place is not None]
    in_use = np.zeros(len(page_table), bool)
    in_use[places] = True
    free = np.flatnonzero(~in_use)[: batch - len(places)]
    return Placement(page_table.copy(), in_use, np.asarray([*places, *free], np.int32))


def apart(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cuts (source, target) pages, in the order of admission, where one reads or writes what another before it wrote or read.

    A sequence may copy the page that one before it has just copied, or get a page that one before it copies, if pages are few.
    A program copies all its pages in any order.
    """
    programs: list[list[tuple[int, int]]] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for source, target in copies:
        if not programs or source in targets or target in sources:
            programs.append([])
            sources.clear()
            targets.clear()
        programs[-1].append((source, target))
        sources.add(source)
        targets.add(target)
    return programs
