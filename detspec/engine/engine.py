"""The engine: many requests at once, one step at a time.

The life of a request:

1. `add` checks it and queues its samples; any thread may call it, also while others run.
2. `step` collects the segment on the device: what has ended gives its place and pages back.
3. Samples that wait get places and pages, shared ones where their tokens are known; the planner chooses a plan that the pages
   last for, and the next segment starts.
4. While it runs, `step` puts the updates of the one before together and returns them.

What raises for one request, such as a tokenizer that cannot decode its tokens, ends that request alone, see `Completion.error`.

`generate`, `run` and `stream` drive `step`, see `detspec.engine.drive`; a server has a loop of its own.
"""

import contextlib
import dataclasses
import hashlib
import json
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.draft.source import Drafter
from detspec.engine.agreement import Agreement, Alone, agreement_of
from detspec.engine.allocator import Allocator
from detspec.engine.behind import Behind
from detspec.engine.certify import Certificate
from detspec.engine.certify_mesh import mesh_of_bits
from detspec.engine.device import Device
from detspec.engine.drive import drive
from detspec.engine.ending import end_if_done, update_of
from detspec.engine.engine_config import EngineConfig
from detspec.engine.failure import NOT_OF_ONE, failed
from detspec.engine.next_segment import next_segment
from detspec.engine.pages import PagePool
from detspec.engine.planner import Planner
from detspec.engine.policy import Needs, Plan, Segment, needed_batches, worth_making
from detspec.engine.request import (
    ABORTED,
    Completion,
    Request,
    Stats,
    Update,
    check_request,
    generate_all,
    request_of,
    score_all,
)
from detspec.engine.scheduler import Scheduler
from detspec.engine.segments import Segments
from detspec.engine.sequence import SequenceState, wants_replay
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.held import compiler_options
from detspec.model.params import Params, fitted
from detspec.sampling_params import SamplingParams
from detspec.state import NOT_FINITE, RUNNING

IMPROVED_AFTER = 4096  # steps and passes over prompts: then all that makes a job faster is worth seconds of compiling


class Engine:
    """Generates for many requests at once; places are refilled as they get free.

        engine = ds.Engine(ds.load(), ds.EngineConfig(max_requests=8))
        completions = engine.generate(["def fib(n):"], ds.SamplingParams(max_tokens=64))

    Any thread may call `add` and `abort`; all else belongs to one thread, the one that steps.

    Attributes:
        compiles_behind: what makes requests faster is compiled while they run, see `compile_behind`; else in a step.
        config: how it runs.
        schedule: numerics and budget of the anchor, whose bits are committed.
        device: weights, state and programs.
        agreement: what it asks before it uses what only its own process knows.
        planner: its plans, with their times.
        certificates: what is known of each program so far.
        scheduler: requests in flight.
        pool: cache pages.
        num_pages: how many of them requests share.
        stats: what speculation did for all requests that have ended so far, aborted ones too.
        num_tokens: tokens that all segments so far have committed.
    """

    def __init__(
        self, model: Model, config: EngineConfig | None = None, *, drafters: Mapping[str, Drafter] | None = None
    ) -> None:
        """Allocates the cache; on several chips, compares them with one. Programs are compiled when a step first needs them.

        `drafters` are further draft sources with their weights, by the names that `config.method` may have.

        Raises `InputError` if the device does not run the schedule, or config, drafters and model do not fit together.
        """
        device = Device(model, config or EngineConfig(), drafters=drafters)
        self._drive_on(device, agreement_of(device.place))

    @classmethod
    def over(cls, device: Device, agreement: Agreement | None = None) -> "Engine":
        """An engine that drives `device`, or anything with its methods, alone or by `agreement` with others."""
        engine = cls.__new__(cls)
        engine._drive_on(device, agreement or Alone())
        return engine

    def _drive_on(self, device: Device, agreement: Agreement) -> None:
        if unknown := [name for name in device.config.methods if name not in ("auto", *device.drafters)]:
            names = ", ".join(("auto", *device.drafters))
            raise InputError(f"EngineConfig.method must be one of {names}, got {unknown[0]!r}")
        self.device = device
        self.agreement = agreement
        self.compiles_behind = False
        self.config = device.config
        self.schedule = device.schedule
        self.stats = Stats()
        self.num_tokens = 0
        self.num_pages = device.num_pages
        self.planner = Planner(device, agreement)
        self.certificates = self.planner.certificates
        self.pool = PagePool(device.num_pages)
        allocator = Allocator(
            self.pool,
            page=device.schedule.numerics.page,
            max_requests=device.config.max_requests,
            max_pages=device.max_pages,
            sharing=device.config.prefix_sharing,
        )
        thinking = device.model.cfg.thinking
        self.scheduler = Scheduler(
            allocator,
            max_requests=device.config.max_requests,
            window=device.schedule.budget.window,
            chunk=None if thinking is None else thinking.chunk,
        )
        self._segments = Segments(device, agreement.observer(self.planner.step_times), self.planner.acceptance)
        self._improves = True
        self._room = device.room  # that samples so far need
        self._behind: Behind | None = None
        self._needs = Needs()  # what was prepared for
        self._batch = 0  # the smallest batch that holds the sequences of the segment on the device
        self._passes: Counter[int] = Counter()  # for each such batch, steps and passes over prompts since plans were made
        self._weight_version: str | None = None
        self._mesh, differs = mesh_of_bits(device)
        if differs:
            warnings.warn(
                f"on these chips bits are not those of one chip, and results say so (mesh {self._mesh!r}): {differs}",
                stacklevel=3,
            )
        self._digest = ""
        self._name_weights()
        self._inbox: deque[SequenceState | str | deque[Update]] = deque()  # new samples, ids to abort, drivers that are gone
        self._news: list[SequenceState] = []  # sequences whose updates are still to be made
        self._outbox: deque[Update] = deque()  # of requests that came by `add`
        self._is_running = False  # a segment is on the device
        self._is_stepping = False

    @property
    def model(self) -> Model:
        """The model that it runs."""
        return self.device.model

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do, or updates to return."""
        return bool(self._inbox or self.scheduler.all or self._news or self._outbox)

    @property
    def num_places(self) -> int:
        """Most samples that run at once."""
        return self.config.max_requests

    @property
    def num_live(self) -> int:
        """Samples that have a place on the device."""
        return len(self.scheduler.sequences)

    @property
    def num_preemptions(self) -> int:
        """How often a sample gave its pages back to be caught up with later."""
        return self.scheduler.num_preemptions

    @property
    def num_pages_held(self) -> int:
        """Cache pages that requests hold now."""
        return self.pool.num_held

    @property
    def acceptance_by_match_length(self) -> dict[int, float]:
        """Chance that a guess of prompt lookup agreed after a match of so many tokens, where any was verified."""
        return self.device.acceptance_by_match_length

    @property
    def busy_s(self) -> float:
        """Seconds that the device had a segment to run."""
        return self.device.clock.busy_s

    @property
    def idle_s(self) -> float:
        """Seconds that the device waited for the host between two segments."""
        return self.device.clock.idle_s

    def fingerprint(self) -> dict[str, object]:
        """Everything but the request that committed bits may depend on."""
        version = {} if self._weight_version is None else {"weight_version": self._weight_version}
        own = {"mesh": self._mesh, "model": self.model.digest, **version, "schedule": self.schedule.bits()}
        machine = fingerprint()
        options = compiler_options(self.schedule.numerics, machine["backend"])
        return {**machine, **({"options": options} if options else {}), **own}

    def request(self, prompt: str | Sequence[int], sampling: SamplingParams, *, id: str = "0") -> Request:
        """One prompt, text or token ids, as a request that this engine takes.

        Raises `InputError` if the prompt is empty, too long, or holds ids outside the vocabulary, if it is text and the model
        has no tokenizer, or if `sampling` asks for more than the engine has room for.
        """
        return request_of(self.model, self.config, prompt, sampling, id=id)

    def add(self, request: Request, *, stream: bool = False, outbox: deque[Update] | None = None) -> None:
        """Queues a request and returns at once; `step` runs it and returns its updates.

        Args:
            request: its `id` names it in updates and for `abort`; ids of requests in flight should differ.
            stream: updates come with each step that commits tokens, and steps are short; else one update at the end.
            outbox: where its updates go; None for that of all who do not care, which `step` returns by default.

        Raises:
            InputError: the request is unsound or does not fit this engine, see `request`.
        """
        samples = check_request(self.model, self.config, request).samples()
        outbox = self._outbox if outbox is None else outbox
        self._inbox.extend([SequenceState(sample, self.model.token_bytes, outbox, stream) for sample in samples])

    def abort(self, id: str) -> None:
        """Ends all samples of a request at the next step; their last updates hold what was committed, reason "abort"."""
        if self.agreement.aborts(id):
            self._inbox.append(id)

    def step(self, outbox: deque[Update] | None = None) -> list[Update]:
        """Starts a segment, and returns what the one before brought; an empty list if there is nothing to do.

        Updates are those for `outbox`, see `add`; those for others wait there.

        Raises `InputError` if a deterministic request is in flight and this device certifies no plan for it. Nothing is lost:
        abort such requests, and step on.
        """
        outbox = self._outbox if outbox is None else outbox
        self._advance()
        updates = list(outbox)
        outbox.clear()
        return updates

    def generate(
        self, prompts: str | Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Completes all `prompts`; `sampling` for all of them or one each.

        A prompt is a text, or token ids in a list, a tuple, a range or an array; the rows of an array are prompts. A text alone
        is one prompt.

        Returns:
            Completions in input order; the `n` samples of a prompt follow each other. One that failed has an `error`.

        Raises `InputError` for anything else, such as the token ids of one prompt alone, and as `request` does.
        """
        return generate_all(self, prompts, sampling)

    def score(
        self,
        texts: str | Sequence[str | Sequence[int]],
        starts: int | Sequence[int] = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Log-probabilities of given texts, with the bits that generation reports for the tokens it commits.

        Texts that begin alike share the pages of what they have in common, as prompts do. They are read without thoughts.

        Args:
            texts: texts or token ids, as for `generate`.
            starts: number of leading tokens that are not scored, at least 1; for all texts or one each.
            sampling: what is reported: `logprobs`, how many of the likeliest tokens; `logprobs_mode`, with the parameters that
                it takes into account. Greedy, and the likeliest token, if None.

        Returns:
            Completions in input order, with the finish reason "given"; token ids and log-probabilities are those from `starts`
            on. A text is what the model would write greedily if each `top_logprobs` begins with the token that is given.

        Raises `InputError` as `request` does, and if a text has no token from its start on.
        """
        return score_all(self, texts, starts, sampling)

    def run(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """Yields completions as they finish; keeps about twice `num_places` of `requests` queued or running.

        An iterator that has nothing to give at the moment yields None, and what is in flight goes on. One that waits instead
        holds up the thread that drives the engine.
        """
        for update in self._updates(requests, stream=False):
            if update.completion is not None:
                yield update.completion

    def stream(self, prompt: str | Sequence[int], sampling: SamplingParams) -> Iterator[Update]:
        """Yields updates of one completion as tokens are committed; only final tokens and final text ever leave.

        Raises `InputError` if the prompt is unsound, or more than one sample is asked for.
        """
        request = self.request(prompt, sampling)
        if sampling.n != 1:
            raise InputError(f"a stream is of one sample, got n = {sampling.n}: stream each with its seed, or use generate")
        for update in self._updates([request], stream=True):
            if update.token_ids or update.text or update.completion is not None:
                yield update

    def prepare(
        self, num_requests: int | None = None, needs: Needs | None = None, *, first_only: bool = False
    ) -> tuple[Certificate, ...]:
        """Compiles, certifies and times programs ahead; steps do it by themselves when they first need one.

        Args:
            num_requests: samples at once (`n` of a request count `n` times), None for any traffic, as a server should.
            needs: what they need of programs, anything if None.
            first_only: no more than the first step waits for: one batch size, no drafts, nothing timed. The rest is made after
                four thousand passes, for the batches that these needed, unless all that was wanted has been prepared.

        Returns what is known of each program so far.

        Raises `InputError` if thoughts of this model depend on places or drafts on this device.
        """
        num_requests = self.config.max_requests + 1 if num_requests is None else num_requests
        if first_only:
            self._make_first(num_requests, needs or Needs())
        else:
            self._make_all(needed_batches(self.config, num_requests), needs or Needs())
            self._improves = False
        return tuple(self.certificates.values())

    def prepare_behind(self, needs: Needs | None = None) -> None:
        """Makes one program that can run all that `needs` say, any requests if None; leaves the others to `go_on_preparing`.

        Processes that share a mesh make all of them at once, because each must make the same at the same time. Raises
        `InputError` if thoughts of this model depend on places or drafts on this device.
        """
        self._needs = needs or Needs()
        self.compile_behind()
        if not self.compiles_behind:
            self.prepare(needs=self._needs)
            return
        self._improves = False
        everything = self.config.max_requests + 1
        batches = needed_batches(self.config, everything)
        self.planner.coming = self.planner.missing(batches, self._needs)  # also while the first is made
        self._make_first(everything, self._needs._replace(ordinary=not self._needs.deterministic))
        self._make_behind(batches, self._needs, replays=True)

    def compile_behind(self) -> None:
        """From now on leaves what makes requests faster to `go_on_preparing`, but for processes that share a mesh."""
        self.compiles_behind = isinstance(self.agreement, Alone)

    def go_on_preparing(self) -> bool:
        """Tries a program that was compiled behind, if one is there and the time has come; returns whether it did.

        Call it between two steps. Requests in flight stand still meanwhile, and go on to the same bits; see `Behind`. A
        program that cannot be compiled or tried is logged, and named by `not_made`; requests go on without it.
        """
        if self._behind is None or not self._behind.is_due(is_idle=not self.has_work):
            return False
        self._empty_device()
        self._behind.go_on()
        self.planner.coming = self._behind.missing
        if self._behind.is_over:
            self._behind = None
        return True

    @property
    def compiling(self) -> tuple[str, ...]:
        """Labels of what is being compiled behind, or will be: plans, and replays that say likeliest tokens."""
        behind = self._behind
        return (*(plan.label for plan in self.planner.coming), *(() if behind is None else behind.others))

    @property
    def not_made(self) -> tuple[str, ...]:
        """Labels of what could not be compiled or tried behind; the log has the tracebacks."""
        return tuple(self.planner.failed)

    @property
    def is_prepared(self) -> bool:
        """Whether nothing is being made behind."""
        return self._behind is None

    def update_params(self, params: Params, weight_version: str | None = None) -> None:
        """Goes on with other weights of the same shapes; what pages hold is forgotten, nothing is compiled again.

        `weight_version` names them in fingerprints and digests. By default they are named by a digest of all weights, which
        takes as long as reading them. A model in int8 takes weights of its `cfg.dtype`, too, and rounds them.

        Raises `InputError` if requests are in flight, or a weight has another shape or dtype than the model's.
        """
        self._take_in()
        if self.has_work:
            raise InputError("requests are in flight: finish or abort them before the weights change")
        params = fitted(params, self.model.cfg)
        digest = digest_model(self.model.cfg, params) if weight_version is None else ""
        self.device.use(dataclasses.replace(self.model, params=params, digest=digest))
        self._weight_version = weight_version
        self._name_weights()

    def stop(self) -> list[Update]:
        """Drops all requests; returns the updates that were due, of the segment on the device too."""
        self._collect()
        self._take_in()
        self._hand_out()
        self.scheduler.take_out(lambda sequence: True)
        self._segments.rest()
        updates = list(self._outbox)
        self._outbox.clear()
        return updates

    def _updates(self, requests: Iterable[Request | None], *, stream: bool) -> Iterator[Update]:
        """Drives `requests` and yields their updates; when it is closed, so are they."""
        outbox: deque[Update] = deque()
        try:
            for updates in drive(self, requests, stream=stream, outbox=outbox):
                yield from updates
        finally:
            self._inbox.append(outbox)
            if not self._is_stepping:  # the garbage collector may close a driver at any moment
                self._take_in()

    def _advance(self) -> None:
        """Collects a segment, starts the next, and puts updates into their outboxes while the device works."""
        self._is_stepping = True
        try:
            self._collect()
            self._take_in()
            self._make_room()
            self._prepare_for(self.scheduler.all)
            if admitted := self.scheduler.admit(self._alone):

                def put(some: Sequence[SequenceState]) -> None:
                    self._segments.admit([each for each in admitted if each.sequence in some])

                self._together(put, [each.sequence for each in admitted])
            if self.scheduler.sequences:
                self._start()
            else:
                self._segments.rest()
            self._hand_out()
        finally:
            self._is_stepping = False

    def _make_room(self) -> None:
        """Gives programs the room that samples need. Where all was prepared, requests wait for one program, once."""
        if self._room == self.device.room:
            return
        self._empty_device()
        self.device.widen(self._room)
        self.planner.forget_programs()
        self._behind = None  # what is on its way has the room that there was
        if self.compiles_behind and not self._improves:
            self.prepare_behind(self._needs)
        elif not self._improves:
            self._make_first(self.config.max_requests, Needs())
            self._improves = True

    def _prepare_for(self, sequences: Sequence[SequenceState]) -> None:
        """Makes the programs that `sequences` need; where some run already, traffic grows, so those of the largest batch.

        The others that would make them faster follow when many steps have run, for the batches that took part in these.
        """
        if not sequences:
            return
        needs = Needs.of(sequence.request.sampling for sequence in sequences)
        if self.planner.lacks(len(sequences), needs):
            self._make_first(self.config.max_requests if self.scheduler.sequences else len(sequences), needs)
        if self._improves and self._passes.total() >= IMPROVED_AFTER:
            batches = worth_making(self._passes)
            self._passes.clear()
            if not self.compiles_behind:
                self._make_all(batches, needs)
            elif self._behind is None and self.planner.lacks_any(batches, needs):
                self._make_behind(batches, needs)

    def _make_first(self, num_requests: int, needs: Needs) -> None:
        """Makes what `num_requests` at once lack to run at all."""
        if self.planner.lacks(num_requests, needs):
            self._empty_device()
            self.planner.prepare_first(num_requests, needs)

    def _make_all(self, batches: Sequence[int], needs: Needs) -> None:
        """Makes all plans of `batches` that are missing."""
        if self.planner.lacks_any(batches, needs):
            self._empty_device()
            self.planner.prepare(batches, needs)

    def _make_behind(self, batches: Sequence[int], needs: Needs, *, replays: bool = False) -> None:
        """Begins to make all plans of `batches` that are missing, while requests run."""
        self._behind = Behind(self.device, self.planner, batches, needs, replays=replays)
        self.planner.coming = self._behind.missing

    def _empty_device(self) -> None:
        """Takes all sequences out of their places, to go on to the same bits later: trial runs need all places and pages."""
        self._collect()
        while self.scheduler.sequences:
            self._preempt()
        self.pool.clear()

    def _take_in(self) -> None:
        """Queues what was added, and ends what was aborted or left by its driver, in the order of the calls."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, SequenceState):
                self.scheduler.queue.append(item)
                self._room = self._room.with_room_for(item.request.sampling, self.model.eos_ids)
            elif isinstance(item, str):
                for sequence in self.scheduler.all:
                    if sequence.request.id == item:
                        with self._alone(sequence):
                            self._abort(sequence)
            else:
                self.scheduler.take_out(lambda sequence, outbox=item: sequence.outbox is outbox)  # type: ignore[misc]
        if self._is_running and not self.scheduler.sequences:
            self._collect()
            self._segments.rest()

    def _abort(self, sequence: SequenceState) -> None:
        """Ends `sequence` with what it has committed."""
        self._segments.fetch(sequence)
        end_if_done(sequence)  # tokens after a stop string are void here, too
        sequence.thoughts.clear()  # the prompt may not have been read to its end
        sequence.finish_reason = ABORTED
        self._end(sequence, keep=False)

    def _start(self) -> None:
        """Starts passes over given texts, and one segment over all other sequences in places; does not wait for them."""
        page_table = self.scheduler.allocator.page_table
        next_segment = self._plan() if self.scheduler.decoding else None
        if given := self.scheduler.given:
            self._together(lambda some: self._segments.start_scoring(some, page_table), given)
        if next_segment is not None:
            plan, segment = next_segment
            decoding = self.scheduler.decoding
            [self._batch] = needed_batches(self.config, len(decoding))
            self.agreement.started(plan, segment, decoding, page_table)
            self._segments.start(plan, segment, decoding, page_table)
        self._is_running = True

    def _plan(self) -> tuple[Plan, Segment]:
        """The next plan and how long to run it, with pages reserved; sequences that they do not last for are preempted."""
        while (found := next_segment(self.scheduler, self.planner, self.device, self.agreement)) is None:
            self._preempt()
        return found

    def _preempt(self) -> None:
        """Takes the youngest sequence out of its place, to go on later."""
        youngest = self.scheduler.sequences[-1]
        with self._alone(youngest):
            self._segments.fetch(youngest)
            self.scheduler.preempt()

    def _collect(self) -> None:
        """Waits for the segment on the device, if there is one; sequences that have ended give their places back."""
        if not self._is_running:
            return
        self._is_running = False
        num_passes, num_tokens = self._segments.wait()
        self._passes[self._batch] += num_passes
        self.num_tokens += num_tokens
        ended: list[SequenceState] = []
        for sequence in tuple(self.scheduler.sequences):
            with self._alone(sequence):
                if sequence.is_given:
                    sequence.take_scores()
                self.scheduler.allocator.register(sequence)
                is_done = sequence.finish != RUNNING
                if not sequence.is_given and (sequence.streamed or is_done or sequence.request.sampling.stop):
                    self._segments.fetch(sequence)
                    end_if_done(sequence)
                if sequence.finish_reason:
                    ended.append(sequence)
                elif sequence.streamed:
                    self._news.append(sequence)
        self._inbox.extend(self.agreement.finished(self.scheduler.all))
        to_replay = [sequence for sequence in ended if wants_replay(sequence.request) and not sequence.is_given]
        if to_replay:
            page_table = self.scheduler.allocator.page_table
            self._together(lambda some: self._segments.replay(some, page_table), to_replay)
        for sequence in ended:
            if sequence.place is not None:  # else it has failed
                with self._alone(sequence):
                    self._end(sequence, keep=sequence.finish != NOT_FINITE)

    def _end(self, sequence: SequenceState, *, keep: bool) -> None:
        """Takes back the place and pages of a sequence that has ended; with `keep` its pages stay cached."""
        self.scheduler.remove(sequence, keep=keep)
        self.stats += sequence.stats
        self._news.append(sequence)

    def _hand_out(self) -> None:
        """Puts the updates of all sequences that have news into their outboxes."""
        for sequence in dict.fromkeys(self._news):  # one that is streamed may have news, and be aborted then
            with self._alone(sequence):
                sequence.outbox.append(update_of(sequence, self.model, self._digest))
        self._news.clear()

    @contextlib.contextmanager
    def _alone(self, sequence: SequenceState) -> Iterator[None]:
        """Lets an error inside end `sequence` and nothing else, unless it is no fault of one request."""
        try:
            yield
        except NOT_OF_ONE:
            raise
        except Exception as error:
            if sequence in self.scheduler.all:
                self.scheduler.remove(sequence, keep=False)
            self._news = [other for other in self._news if other is not sequence]
            sequence.outbox.append(failed(sequence, error))

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

    def _name_weights(self) -> None:
        """Digests of what the bits depend on: in hex for completions, as bytes for the contents of pages."""
        self._digest = hashlib.sha256(json.dumps(self.fingerprint(), sort_keys=True).encode()).hexdigest()
        self.pool.clear(bytes.fromhex(self._digest))
