"""The engine: the life of a request.

1. `_admit` gives waiting requests rows and pages, shared ones where their tokens are known.
2. `_step` lets the policy choose a plan that the pages last for, and starts a segment on the device.
3. While the segment runs, the completions of the one before go out.
4. `_collect` waits for it and takes out what has finished; rows and pages are free again.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.engine.allocator import Allocator
from detspec.engine.certify import Certificate
from detspec.engine.ending import Finished, complete, stopped
from detspec.engine.engine_config import EngineConfig
from detspec.engine.pages import PagePool
from detspec.engine.parse_request import check_ordinary, read_request, settled
from detspec.engine.planner import Planner
from detspec.engine.policy import Plan, Segment, plan_segment
from detspec.engine.request import ABORTED, FINISH_REASONS, Completion, Piece, Request, Stats
from detspec.engine.runner import Runner
from detspec.engine.scheduler import Scheduler
from detspec.engine.sequence import SequenceState
from detspec.engine.text import showable
from detspec.environment import chosen_schedule, fingerprint
from detspec.errors import InputError
from detspec.model.params import Params, check_params
from detspec.sampling_params import SamplingParams
from detspec.state import NOT_FINITE, RUNNING

TRIED_STEPS = 4  # of a plan that has not run for long, to see what it takes by now


class Engine:
    """Generates for many requests at once, rows refilled as they finish.

    Example::

        engine = ds.Engine(ds.load(), ds.EngineConfig(max_requests=8))
        completions = engine.generate(["def fib(n):"], ds.SamplingParams(max_tokens=64))

    Attributes:
        model, config, schedule: what it runs, and how.
        stats: what speculation did for all requests that have ended so far, aborted ones too.
    """

    def __init__(self, model: Model, config: EngineConfig | None = None) -> None:
        """Allocates the cache. Programs are compiled and certified when a run first needs them."""
        self.model = model
        self.config = config or EngineConfig()
        self.schedule = chosen_schedule(self.config.schedule, model.cfg)
        self.stats = Stats()
        max_requests, max_len, page = self.config.max_requests, self.config.max_len, self.schedule.numerics.page
        if max_len > model.cfg.max_position:
            raise InputError(f"max_len {max_len} exceeds the {model.cfg.max_position} positions that the model was made for")
        max_pages = -(-max_len // page)
        num_pages = max_requests * max_pages if self.config.num_pages is None else self.config.num_pages
        if num_pages < max_requests:
            raise InputError(f"num_pages ({num_pages}) must be at least max_requests ({max_requests}): a page for every row")
        self.planner = Planner(model, self.schedule, self.config, num_pages=num_pages)
        self._runner = Runner(model, self.schedule, self.config, self.planner.step_times, num_pages=num_pages)
        self._pool = PagePool(num_pages)
        sharing = self.config.prefix_sharing
        allocator = Allocator(self._pool, page=page, max_requests=max_requests, max_pages=max_pages, sharing=sharing)
        chunk = None if model.cfg.thinking is None else model.cfg.thinking.chunk
        self._scheduler = Scheduler(allocator, max_requests=max_requests, window=self.schedule.budget.window, chunk=chunk)
        self._weight_version: str | None = None
        self._read_fingerprint()
        self._running = self._stopping = False
        self._aborted: list[SequenceState] = []

    def fingerprint(self) -> dict[str, object]:
        """Everything but the request that committed bits may depend on."""
        version = {} if self._weight_version is None else {"weight_version": self._weight_version}
        return {**fingerprint(), "model": self.model.digest, **version, "schedule": self.schedule.bits()}

    @property
    def certificates(self) -> dict[Plan, Certificate]:
        """What is known of each program so far."""
        return self.planner.certificates

    @property
    def num_preemptions(self) -> int:
        """How often a row gave its pages back to be caught up with later."""
        return self._scheduler.num_preemptions

    @property
    def num_pages(self) -> int:
        """Cache pages that rows share."""
        return self._pool.num_pages

    @property
    def num_pages_held(self) -> int:
        """Cache pages that rows hold now."""
        return self._pool.num_held

    @property
    def busy_s(self) -> float:
        """Seconds that the device had a segment to run."""
        return self._runner.clock.busy_s

    @property
    def idle_s(self) -> float:
        """Seconds that the device waited for the host between two segments."""
        return self._runner.clock.idle_s

    def prepare(self, num_requests: int, *, deterministic: bool = True) -> tuple[Certificate, ...]:
        """Compiles, certifies and times the programs that a run of `num_requests` needs; runs do it by themselves.

        Args:
            num_requests: samples, that is: `n` of a request count `n` times.
            deterministic: whether there are deterministic ones among them.

        Raises:
            InputError: the engine is in the middle of a run.
        """
        self._check_idle()
        if self.planner.lacks(num_requests, deterministic):
            self._pool.clear()  # the trial runs write over all pages
            self._runner.state = self.planner.prepare(self._runner.state, num_requests, deterministic)
            if self.config.prefix_sharing:
                self._runner.prepare()
        return tuple(self.certificates.values())

    def update_params(self, params: Params, weight_version: str | None = None) -> None:
        """Goes on with other weights of the same shapes; what pages hold is forgotten, nothing is compiled anew.

        Args:
            params: the new weights.
            weight_version: names them in fingerprints and digests. By default they are named by a digest of all weights, which
                takes as long as reading them.

        Raises:
            InputError: the engine is in the middle of a run, or a weight has another shape or dtype than before.
        """
        self._check_idle()
        check_params(self.model.cfg, params)
        digest = digest_model(self.model.cfg, params) if weight_version is None else ""
        self.model = dataclasses.replace(self.model, params=params, digest=digest)
        self.planner.model = self._runner.model = self.model
        self._weight_version = weight_version
        self._pool.clear()
        self._read_fingerprint()

    def request(self, prompt: str | Sequence[int], sampling: SamplingParams, *, id: str = "0") -> Request:
        """Tokenizes and checks one prompt; raises `InputError` as `read_request` does."""
        return read_request(self.model, self.config, prompt, sampling, id=id)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Completes all `prompts` (texts or token ids); `sampling` for all of them or one each.

        Returns:
            Completions in input order; the `n` samples of a prompt stand side by side.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise InputError(f"{len(prompts)} prompts but {len(each)} sampling parameters: give one for all, or one each")
        requests = [self.request(p, s, id=str(i)) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
        return sorted(self.run(requests), key=lambda completion: (int(completion.id), completion.index))

    def stream(self, prompt: str | Sequence[int], sampling: SamplingParams) -> Iterator[Piece]:
        """Yields pieces of one completion as they are committed; only final tokens and final text ever leave.

        Raises:
            InputError: the prompt is unsound, or more than one sample is asked for.
        """
        if sampling.n != 1:
            raise InputError(f"a stream is of one sample, got n = {sampling.n}: stream each with its seed, or use generate")
        request = self.request(prompt, sampling)
        sent, shown = 0, ""
        for brought in self._rounds([request], segment_steps=1, watch=True):
            for sample, end in brought:
                text = self.model.decode(sample.new_tokens)
                if end is None:
                    text = showable(text, sampling.stop)
                elif end.text is not None:
                    text = end.text
                piece = text[len(shown) :] if text.startswith(shown) else ""
                token_ids, logprobs = sample.new_tokens[sent:], tuple(sample.logprobs[sent:])
                sent, shown = sent + len(token_ids), shown + piece
                if token_ids or piece:
                    yield Piece(token_ids, logprobs, piece)

    def run(
        self,
        requests: Iterable[Request],
        *,
        deterministic: bool = True,
        on_segment: Callable[[int, int], None] | None = None,
    ) -> Iterator[Completion]:
        """Yields completions as they finish; asks `requests` for at most one round of rows more.

        Args:
            requests: checked requests, their ids all different.
            deterministic: whether deterministic ones may come. False spares their programs, which cannot be made in the middle
                of a run; a sequence is looked through for them.
            on_segment: called after each segment with tokens committed since the last call and live rows, for progress bars.
                It may call `stop`; what it raises ends the run at once, without the completions of that segment.

        Raises:
            InputError: the engine is in the middle of a run, or a request is deterministic where none was to come.
        """
        if not deterministic:
            checked = map(check_ordinary, requests)
            requests = list(checked) if isinstance(requests, Sequence) else checked
        for brought in self._rounds(requests, self.config.segment_steps, deterministic=deterministic, on_segment=on_segment):
            for _, end in brought:
                if end is not None:
                    yield complete(end, self.model, self._digest)

    def abort(self, id: str) -> int:
        """Ends a request in the middle of a run, all its samples; its rows and pages are free at once.

        What was committed goes out as completions with finish reason "abort". Returns how many samples were in flight.
        """
        found = self._scheduler.abort(id, self._context)
        self._aborted.extend(found)
        return len(found)

    def stop(self) -> None:
        """Ends the run after the segment on the device, when its completions are out; a signal handler may call it."""
        self._stopping = True

    def _rounds(
        self,
        requests: Iterable[Request],
        segment_steps: int,
        *,
        deterministic: bool = True,
        watch: bool = False,
        on_segment: Callable[[int, int], None] | None = None,
    ) -> Iterator[list[tuple[SequenceState, Finished | None]]]:
        """Admit, step, hand out, collect; until nobody waits and no row is in use.

        Yields what each segment brought, once the next one runs: samples that ended, and with `watch` those that got on.
        """
        self._check_idle()
        if isinstance(requests, Sequence):
            if not requests:
                return
            num_samples = sum(request.sampling.n for request in requests)
            self.prepare(num_samples, deterministic=any(request.sampling.deterministic for request in requests))
        else:
            self.prepare(self.config.max_requests + 1, deterministic=deterministic)
        self._running, self._stopping = True, False
        try:
            self._scheduler.feed(settled(request, self.model.cfg) for request in requests)
            brought: list[tuple[SequenceState, Finished | None]] = []
            while True:
                if not self._stopping:
                    self._admit()
                running = bool(self._scheduler.samples) and not self._stopping
                if running:
                    self._step(segment_steps)
                yield brought
                if not running and not self._aborted:
                    return
                brought = self._collect(watch, on_segment) if running else []
                for sample in self._aborted:
                    self._runner.read(sample)
                    sample.thoughts.clear()  # of a prompt that was read to its end or not
                    self.stats += sample.stats
                    brought.append((sample, Finished(sample, ABORTED)))
                self._aborted.clear()
        finally:
            self._scheduler.clear(self._context)
            self._aborted.clear()
            self._runner.rest()
            self._running = False

    def _admit(self) -> None:
        """Puts those who wait into free rows."""
        admitted = self._scheduler.admit(self._context)
        if admitted.samples:
            self._runner.admit(admitted)

    def _step(self, segment_steps: int) -> None:
        """Starts one segment over all rows in use, and does not wait for it."""
        plan, segment = self._plan(segment_steps)
        self._runner.start(plan, segment, self._scheduler.samples, self._scheduler.allocator.page_table)
        self._scheduler.look_ahead()  # reads what is to come while the device works

    def _plan(self, segment_steps: int) -> tuple[Plan, Segment]:
        """The next plan and how long to run it, with pages reserved for it; rows that they do not last for are preempted."""
        while True:
            load = self._scheduler.load()
            plan, trying = self.planner.choose(load.num_deterministic, load.num_ordinary, self.stats)
            segment = plan_segment(
                load,
                plan,
                step_s=self.planner.step_times.known(plan),
                visit_s=self._runner.clock.visit_s,
                segment_steps=min(segment_steps, TRIED_STEPS * plan.window) if trying else segment_steps,
                max_prefill_passes=self.config.max_prefill_passes,
                prefill_rows=self.schedule.budget.rows,
                prefill_window=self.schedule.budget.window,
                smaller_batch=self.planner.smaller_batch(plan),
            )
            num_steps = self._scheduler.affordable(segment.num_steps, plan.window)
            if num_steps:
                self._scheduler.reserve(num_steps * plan.window)
                return plan, segment.shortened(num_steps)
            self._runner.read(self._scheduler.samples[-1])
            self._scheduler.preempt(self._context)

    def _collect(
        self, watch: bool, on_segment: Callable[[int, int], None] | None
    ) -> list[tuple[SequenceState, Finished | None]]:
        """Waits for the segment and takes finished samples out of their rows."""
        brought: list[tuple[SequenceState, Finished | None]] = []
        num_tokens = 0
        for sample, (committed, length, finish, *counters) in self._runner.wait():
            if sample.row is None:
                continue  # aborted meanwhile
            num_tokens += committed - sample.committed
            sample.committed, sample.length, sample.stay = committed, length, Stats(*counters)
            self._scheduler.allocator.register(sample)
            end = None if finish == RUNNING else Finished(sample, FINISH_REASONS[finish], keep=finish != NOT_FINITE)
            if end is not None or watch or sample.request.sampling.stop:
                first = len(sample.new_tokens) + 1
                self._runner.read(sample)
                end = stopped(sample, first, self.model) or end
            if end is not None or watch:
                brought.append((sample, end))
        ended = [end for _, end in brought if end is not None]
        to_replay = [end.sample for end in ended if end.sample.wants_replay]
        if to_replay:
            self._runner.replay(to_replay, self._scheduler.allocator.page_table)
        for end in ended:
            self._scheduler.remove(end.sample, self._context, keep=end.keep)
            self.stats += end.sample.stats
        if on_segment is not None:
            on_segment(num_tokens, len(self._scheduler.samples))
        return brought

    def _check_idle(self) -> None:
        if self._running:
            raise InputError("this engine is in the middle of another run: finish it first, or make a second engine")

    def _read_fingerprint(self) -> None:
        """Digests of what the bits depend on: in hex for completions, as bytes for the contents of pages."""
        self._digest = hashlib.sha256(json.dumps(self.fingerprint(), sort_keys=True).encode()).hexdigest()
        self._context = bytes.fromhex(self._digest)
