"""The device's side of the engine: its state, the programs that are started on it, and the clock."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from detspec.cache import SCRATCH_PAGE
from detspec.checkpoint.load import Model
from detspec.engine.clock import Clock
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Plan, Segment
from detspec.engine.programs import Report, copy_pages, prefill_rows, run_segment, score_rows
from detspec.engine.scheduler import Admitted
from detspec.engine.sequence import SequenceState
from detspec.engine.step_times import StepTimes
from detspec.generate.insert import Requests, commit_like, init_state, no_requests, pack_requests
from detspec.sampling_params import MAX_LOGPROBS
from detspec.schedule import Schedule
from detspec.thinking.thoughts import thought_lists


@dataclasses.dataclass(frozen=True)
class _Running:
    """The segment on the device, its samples in the order of its rows."""

    plan: Plan
    samples: tuple[SequenceState, ...]
    rounds: Report | None  # after the last round
    steps: Report | None  # after the steps alone

    @property
    def last(self) -> Report:
        """What is known at its end."""
        report = self.steps or self.rounds
        assert report is not None
        return report


class Runner:
    """Starts one segment after another and waits for each.

    Attributes:
        model: the weights that it runs.
        state: of the device; every program takes it and gives the next one.
        clock: how long it worked, and waited for the host.
    """

    def __init__(
        self, model: Model, schedule: Schedule, config: EngineConfig, step_times: StepTimes, *, num_pages: int
    ) -> None:
        """Allocates the cache; tells `step_times` what segments take."""
        self.model = model
        state = init_state(
            model.cfg,
            max_requests=config.max_requests,
            max_len=config.max_len,
            max_stop_ids=config.max_stop_ids,
            max_logit_bias=config.max_logit_bias,
            schedule=schedule,
            num_pages=num_pages,
        )
        self.state = commit_like(model.params, state)
        self.clock = Clock()
        self._nobody = self._requests = no_requests(self.state)
        self._schedule, self._max_rows, self._step_times = schedule, config.max_requests, step_times
        self._guesses = config.guesses
        self._running: _Running | None = None

    def admit(self, admitted: Admitted) -> None:
        """Copies the pages that samples begin with, and puts them into their rows when the next segment starts."""
        copies = [(source, target) for source, target in admitted.copies if source != SCRATCH_PAGE]
        if copies:
            self._copy_pages(copies)
        samples = admitted.samples
        self._requests = pack_requests(
            self.state,
            [sample.row for sample in samples if sample.row is not None],
            [sample.tokens for sample in samples],
            [sample.request.sampling for sample in samples],
            self.model.eos_ids,
            prompt_lens=[sample.prompt_len for sample in samples],
            logprobs=[sample.logprobs for sample in samples],
            lengths=[sample.length for sample in samples],
            thoughts=[sample.thoughts for sample in samples],
        )

    def prepare(self) -> None:
        """Compiles what is not a plan's, so that no compilation falls into a run."""
        self._copy_pages([])

    def start(self, plan: Plan, segment: Segment, samples: Sequence[SequenceState], page_table: np.ndarray) -> None:
        """Starts a segment over the rows of `samples`, all that are in use, and does not wait for it."""
        rows = [sample.row for sample in samples if sample.row is not None]
        in_use = np.zeros(self._max_rows, bool)
        in_use[rows] = True
        free = np.flatnonzero(~in_use)[: plan.batch - len(rows)]
        taken = np.asarray([*rows, *free], np.int32)
        table = page_table.copy()  # the device may read it while the host goes on
        params, cfg = self.model.params, self.model.cfg

        def prefill(requests: Requests) -> None:
            passes = np.int32(segment.prefill_passes)
            self.state = prefill_rows(
                *(params, cfg, self.state, requests, in_use, table, passes), schedule=self._schedule, guesses=self._guesses
            )
            self.clock.work()

        def step(num_steps: int) -> Report:
            limits = (np.int32(limit) for limit in (num_steps, segment.min_live, segment.max_idle))
            self.state, report = run_segment(
                *(params, cfg, self.state, in_use, table, taken, *limits), schedule=self._schedule, plan=plan
            )
            self.clock.work()
            return report

        requests, self._requests = self._requests, self._nobody
        if requests is not self._nobody and not segment.rounds:
            prefill(requests)  # they share all that they need
        rounds = steps = None
        for _ in range(segment.rounds):
            prefill(requests)
            rounds, requests = step(1), self._nobody
        if segment.steps:
            steps = step(segment.steps)
        self._running = _Running(plan, tuple(samples), rounds, steps)

    def wait(self) -> list[tuple[SequenceState, list[int]]]:
        """What the segment that was started last says of each of its rows, once it has ended: see `Report.progress`."""
        running, seen = self._running, True
        assert running is not None
        for report in filter(None, (running.rounds, running.steps)):
            # What had ended before the host looked took an unknown time.
            seen = not report.progress.is_ready()  # type: ignore[attr-defined]  # missing in jax's stub
            num_steps, *facts = np.asarray(report.progress)
            seconds = self.clock.lap()
        self.clock.free()
        if running.steps is not None and seen and num_steps[0]:
            self._step_times.observed(running.plan, seconds / int(num_steps[0]))
        rows = np.stack(facts, axis=1).tolist()
        return list(zip(running.samples, rows, strict=False))  # rows that only filled the batch up say nothing

    def read(self, sample: SequenceState) -> None:
        """Brings the tokens and thoughts that `sample` knows of itself up to what it has committed."""
        if self._running is None or sample not in self._running.samples:
            return
        report, place = self._running.last, self._running.samples.index(sample)
        sample.read(np.asarray(report.tokens)[place], np.asarray(report.logprobs)[place])
        thinking = self.model.cfg.thinking
        if report.thoughts is not None and thinking is not None and sample.thinks:
            num_read = min(sample.length, sample.prompt_len - 1) // thinking.chunk
            sample.thoughts = thought_lists(np.asarray(report.thoughts)[place, :num_read])

    def replay(self, samples: Sequence[SequenceState], page_table: np.ndarray) -> None:
        """Reads the texts of `samples`, still in their rows, once more: for the likeliest tokens, or the prompt's."""
        rows = [sample.row for sample in samples if sample.row is not None]
        chosen = np.zeros(self._max_rows, bool)
        chosen[rows] = True
        start = np.zeros(self._max_rows, np.int32)
        start[rows] = [0 if s.request.sampling.prompt_logprobs is not None else s.prompt_len - 1 for s in samples]
        top_k = min(MAX_LOGPROBS, self.model.cfg.vocab_size)
        found, self.state = score_rows(
            *(self.model.params, self.model.cfg, self.state, chosen, page_table.copy(), start),
            schedule=self._schedule,
            top_k=top_k,
        )
        self.clock.work()
        logprobs, top_ids, top_logprobs = (np.asarray(x) for x in (found.logprobs, found.top_ids, found.top_logprobs))
        self.clock.free()
        for sample, row in zip(samples, rows, strict=True):
            sample.replayed = logprobs[row], top_ids[row], top_logprobs[row]

    def rest(self) -> None:
        """The run is over: the time until the next one is nobody's."""
        self._running, self._requests = None, self._nobody
        self.clock.stop()

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages `(source, target)`, at most one a row."""
        nothing = [(SCRATCH_PAGE, SCRATCH_PAGE)] * (self._max_rows - len(copies))
        source, target = np.asarray([*copies, *nothing], np.int32).T
        self.state = copy_pages(self.state, source, target)
