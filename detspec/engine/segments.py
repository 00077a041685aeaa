"""Segments of steps on the device: the host starts one, goes on with its own work, and then reads what it brought."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from detspec.cache import SCRATCH_PAGE
from detspec.engine.device import Device, GivenText
from detspec.engine.policy import Plan, Segment
from detspec.engine.programs import Placement, Progress, Report
from detspec.engine.request import STATS_FIELDS, Stats
from detspec.engine.scheduler import Admitted
from detspec.engine.sequence import Replayed, SequenceState, asked_from
from detspec.engine.step_times import Acceptance, Observe
from detspec.generation import score
from detspec.generation.insert import Entry
from detspec.generation.loop import Limits
from detspec.state import COUNTED
from detspec.thinking.thoughts import thought_lists

CHECKED_EVERY = 256  # so many reports: then the copies on all chips are compared


class Running(NamedTuple):
    """A segment on the device, its sequences in the order of its reports."""

    plan: Plan
    sequences: tuple[SequenceState, ...]
    prefill_passes: int  # at most
    rounds: Report | None  # after the last round of prefill and step
    steps: Report | None  # after the steps alone

    @property
    def last(self) -> Report:
        """What is known at its end."""
        report = self.steps or self.rounds
        assert report is not None
        return report


class Scoring(NamedTuple):
    """Given texts on the device, and what will be known of them."""

    sequences: tuple[SequenceState, ...]
    found: score.Replayed


class Segments:
    """Starts one segment after another and waits for each; what they take and accept is told to the planner's estimates."""

    def __init__(self, device: Device, observed: Observe, acceptance: Acceptance) -> None:
        """`observed` is told the seconds of the steps of each segment, where they are known."""
        self._device = device
        self._observed = observed
        self._acceptance = acceptance
        self._running: Running | None = None
        self._is_started = False  # the segment `_running` is on the device
        self._scoring: list[Scoring] = []
        self._num_reports = 0

    def admit(self, admitted: Sequence[Admitted]) -> None:
        """Copies the pages that sequences begin with, and puts them into their places when the next segment starts."""
        entries = [
            Entry(
                place=sequence.place,
                tokens=sequence.tokens,
                sampling=sequence.request.sampling,
                prompt_len=sequence.prompt_len,
                logprobs=sequence.logprobs,
                length=sequence.length,
                thoughts=sequence.thoughts,
            )
            for sequence, _ in admitted
            if sequence.place is not None and not sequence.is_given
        ]
        self._device.put(entries)
        copies = [one.copy for one in admitted if one.copy[0] != SCRATCH_PAGE]
        if copies:
            self._device.copy(copies)

    def start(self, plan: Plan, segment: Segment, sequences: Sequence[SequenceState], page_table: np.ndarray) -> None:
        """Starts a segment over `sequences`, all that have a place, and does not wait for it."""
        device = self._device
        assert plan.processing or not any(sequence.request.sampling.needs_processing for sequence in sequences)
        placement = _placement(sequences, page_table, plan.batch)

        def step(num_steps: int) -> Report:
            limits = Limits(num_steps, segment.min_live, segment.max_idle, segment.max_gain)
            return device.step(plan, placement, limits)

        if device.waits and not segment.rounds:
            device.prefill(placement, segment.prefill_passes)  # they share all that they need
        rounds = steps = None
        for _ in range(segment.rounds):
            device.prefill(placement, segment.prefill_passes)
            rounds = step(1)
        if segment.steps:
            steps = step(segment.steps)
        self._running = Running(plan, tuple(sequences), segment.rounds * segment.prefill_passes, rounds, steps)
        self._is_started = True

    def start_scoring(self, sequences: Sequence[SequenceState], page_table: np.ndarray) -> None:
        """Starts the passes over given texts, from what their pages hold on, and does not wait for them."""
        texts: dict[int, GivenText] = {}
        entries: list[Entry] = []
        for sequence in sequences:
            assert sequence.place is not None
            whole = [*sequence.tokens, *sequence.request.given_token_ids]
            texts[sequence.place] = GivenText(whole, sequence.length, asked_from(sequence.request))
            entries.append(Entry(sequence.place, sequence.tokens, sequence.request.sampling))
        self._scoring.append(Scoring(tuple(sequences), self._replay(sequences, page_table, texts, entries)))
        self._device.clock.work()

    def wait(self) -> tuple[int, int]:
        """Waits for the given texts and the segment that were started last, and updates their sequences.

        Returns how many steps and passes over prompts the segment took, at most, and how many tokens it committed.
        """
        clock = self._device.clock
        for scoring in self._scoring:
            for sequence, replayed in _of_each(*scoring):
                sequence.replayed = replayed
            clock.lap()
        self._scoring.clear()
        running = self._running
        if running is None or not self._is_started:
            clock.free()
            return 0, 0
        self._is_started = False
        was_seen = True
        num_passes = running.prefill_passes
        for report in filter(None, (running.rounds, running.steps)):
            was_seen = not report.is_ready  # what had ended before the host looked took an unknown time
            progress = report.progress
            if self._num_reports % CHECKED_EVERY == 0:
                self._device.check_copies(report)
            self._num_reports += 1
            seconds = clock.lap()
            num_passes += int(progress.steps[0])
        clock.free()
        num_steps = int(progress.steps[0])
        if running.steps is not None and was_seen and num_steps and seconds > 0:  # or the clock was set back
            self._observed(running.plan, seconds / num_steps, num_steps)
        return num_passes, self._update(running, progress)

    def fetch(self, sequence: SequenceState) -> None:
        """Brings the tokens and thoughts that `sequence` knows of itself up to what it has committed."""
        if self._running is None or sequence not in self._running.sequences:
            return
        report = self._running.last
        place = self._running.sequences.index(sequence)
        sequence.extend(np.asarray(report.tokens)[place], np.asarray(report.logprobs)[place])
        thinking = self._device.model.cfg.thinking
        if report.thoughts is not None and thinking is not None and sequence.thinks:
            num_read = min(sequence.length, sequence.prompt_len - 1) // thinking.chunk
            sequence.thoughts = thought_lists(np.asarray(report.thoughts)[place, :num_read])

    def replay(self, sequences: Sequence[SequenceState], page_table: np.ndarray) -> None:
        """Replays the texts of `sequences`, still in their places, for the likeliest tokens, or the prompt's."""
        texts: dict[int, GivenText] = {}
        for sequence in sequences:
            assert sequence.place is not None
            wanted_from = asked_from(sequence.request)
            texts[sequence.place] = GivenText(sequence.tokens, max(0, wanted_from - 1), wanted_from)
        for sequence, replayed in _of_each(sequences, self._replay(sequences, page_table, texts)):
            sequence.replayed = replayed
        self._device.clock.free()

    def rest(self) -> None:
        """Nothing is in flight: time until the next segment is not counted."""
        self._running = None
        self._device.clock.stop()

    def _replay(
        self,
        sequences: Sequence[SequenceState],
        page_table: np.ndarray,
        texts: Mapping[int, GivenText],
        entries: Sequence[Entry] = (),
    ) -> score.Replayed:
        """Starts a replay that says as many of the likeliest tokens as any of `sequences` asks for, at least."""
        asked = [sequence.request.sampling for sequence in sequences]
        most = max(max(sampling.logprobs, sampling.prompt_logprobs or 0) for sampling in asked)
        processing = any(sampling.needs_processing for sampling in asked)
        placement = _placement(sequences, page_table, len(sequences))
        wanted = score.Asked.likeliest(processing, most, self._device.model.cfg.vocab_size)
        return self._device.replay(placement, texts, wanted, entries=entries)

    def _update(self, running: Running, progress: Progress) -> int:
        """Tells the sequences how far they are, and the planner what drafts brought."""
        facts = zip(progress.committed.tolist(), progress.length.tolist(), progress.finish.tolist(), strict=True)
        counted = progress.counts[:, [COUNTED.index(name) for name in STATS_FIELDS]].tolist()
        num_tokens = windows = accepted = 0
        for sequence, (committed, length, finish), counters in zip(running.sequences, facts, counted, strict=False):
            stay = Stats(*counters)
            num_tokens += committed - sequence.committed
            windows += stay.num_verify_passes - sequence.stay.num_verify_passes
            accepted += stay.num_accepted_draft_tokens - sequence.stay.num_accepted_draft_tokens
            sequence.stay = stay
            sequence.committed = committed
            sequence.length = length
            sequence.finish = finish
        self._acceptance.observed(running.plan, windows, accepted)
        return num_tokens


def _of_each(sequences: Sequence[SequenceState], found: score.Replayed) -> Iterator[tuple[SequenceState, Replayed]]:
    """Each of `sequences` that still has a place, with what was found of it; waits for the device."""
    logprobs, top_ids, top_logprobs = (np.asarray(x) for x in (found.logprobs, found.top_ids, found.top_logprobs))
    for sequence in sequences:
        if sequence.place is not None:
            yield sequence, (logprobs[sequence.place], top_ids[sequence.place], top_logprobs[sequence.place])


def _placement(sequences: Sequence[SequenceState], page_table: np.ndarray, batch: int) -> Placement:
    """The places of `sequences`, and free ones up to `batch`; the page table is copied, because the host changes it."""
    places = [sequence.place for sequence in sequences if sequence.place is not None]
    in_use = np.zeros(len(page_table), bool)
    in_use[places] = True
    free = np.flatnonzero(~in_use)[: batch - len(places)]
    return Placement(page_table.copy(), in_use, np.asarray([*places, *free], np.int32))
