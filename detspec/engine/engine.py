"""The engine: many requests at once, one step at a time.

`add` checks a request and queues its samples; any thread may call it, also while others run. `step` returns the updates of one
segment while the devices work on the next:

1. It queues new samples, and ends those that were aborted or left.
2. Each replica collects its segment: what has ended gives its place and pages back.
3. It admits samples from the queue that all share, and starts the next segment.
4. While its device works, the updates of the segment before are put together.

What raises for one request, such as a tokenizer that cannot decode its tokens, ends that request alone, see `Completion.error`.

`generate`, `run` and `stream` step by `drive`, which takes requests from anywhere: two rounds of places are in flight, so that
a place which gets free is filled. A server has a loop of its own.
"""

import dataclasses
import hashlib
import json
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.config import is_count
from detspec.draft.source import Drafter
from detspec.engine.agreement import Agreement, Alone, agreement_of
from detspec.engine.certify import Certificate
from detspec.engine.device import Device, moved
from detspec.engine.engine_config import EngineConfig
from detspec.engine.intake import check_is_model, check_request, request_of, to_replay, to_score
from detspec.engine.policy import Needs, Plan
from detspec.engine.replica import Replica, Traffic, drafters_at
from detspec.engine.request import Completion, Replay, Request, Update
from detspec.engine.sequence import NOT_OF_ONE, SequenceState, update_of
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.generation.checks import each_sampling, listed_prompts
from detspec.held import compiler_options
from detspec.integer.spec import VERSIONS
from detspec.mesh import places_of
from detspec.model.params import Params, fitted
from detspec.plain import plain, plain_ids
from detspec.riders.counters import Stats
from detspec.riders.rider import NOTHING, Rider
from detspec.riders.riding import brought
from detspec.sampling_params import SamplingParams

LOOKAHEAD = 4  # rounds of places whose records are put in order together
ROUNDS = 2  # of places, in flight while requests are driven
IDLE_S = 1e-4  # between two looks at an iterator while nothing is in flight


class Engine:
    """Generates for many requests at once; places are refilled as they get free.

        engine = ds.Engine(ds.load(), ds.EngineConfig(max_requests=8))
        completions = engine.generate(["def fib(n):"], ds.SamplingParams(max_tokens=64))

    Any thread may call `add` and `abort`; all else belongs to one thread, the one that steps.

    Attributes:
        config: how it runs.
        schedule: numerics and budget of the anchor, whose bits are committed.
        replicas: copies of the weights, each with a device, places, pages and plans of its own.
        agreement: asked before the engine uses facts that only its own process knows.
        stats: counts of what speculation did for all requests that have ended so far, aborted ones too.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        drafters: Mapping[str, Drafter] | None = None,
        riders: Sequence[Rider] = (),
        num_replicas: int = 1,
    ) -> None:
        """Allocates the cache; on several chips, compares them with one. Programs are compiled when a step first needs them.

        Args:
            model: the weights, on one device or on a mesh.
            config: how it runs; each replica has room for `config.max_requests`.
            drafters: further draft sources with their weights, by the names that `config.method` may have.
            riders: riders that requests may bring values for, see `Request.brings`.
            num_replicas: copies of the weights, each on as many devices of this process as `model` lies on. All of them work at
                the same time, and share one queue.

        Raises `InputError` if `model` is none, the device does not run the schedule, or config, drafters, riders and model do
        not fit together; if there are too few devices, several processes share them, or the fingerprints of replicas differ.
        """
        check_is_model(model)
        config = config or EngineConfig()
        if not is_count(num_replicas):
            raise InputError(f"the number of replicas (engines) must be a positive integer, got {num_replicas!r}")
        if num_replicas == 1:
            devices = [Device(model, config, drafters=drafters, riders=riders)]
        else:
            devices = [
                Device(moved(model, place), config, drafters=drafters_at(place, drafters or {}), riders=riders)
                for place in places_of(model.cfg, model.params, num_replicas)
            ]
        self._drive_on(devices, agreement_of(devices[0].place))

    @classmethod
    def over(cls, devices: Device | Sequence[Device], agreement: Agreement | None = None) -> "Engine":
        """An engine that drives `devices`, or anything with their methods, alone or by `agreement` with others."""
        engine = cls.__new__(cls)
        engine._drive_on([*devices] if isinstance(devices, Sequence) else [devices], agreement or Alone())
        return engine

    def _drive_on(self, devices: Sequence[Device], agreement: Agreement) -> None:
        """Compares several chips with one; raises `InputError` if the devices have bits of their own each."""
        device = devices[0]
        if unknown := [name for name in device.config.methods if name not in ("auto", *device.drafters)]:
            names = ", ".join(("auto", *device.drafters))
            raise InputError(f"EngineConfig.method must be one of {names}, got {unknown[0]!r}")
        self.agreement = agreement
        self.config = device.config
        self.schedule = device.schedule
        self.stats = Stats()
        self._outbox: deque[Update] = deque()  # updates of requests that came without an outbox
        self._is_stepping = False
        self._is_ending = sys.is_finalizing  # kept here: as the interpreter ends, modules lose their names
        self._traffic = Traffic(device.room)
        self.replicas = tuple(Replica(each, agreement, self._traffic) for each in devices)
        self._others = [[other for other in self.replicas if other is not each] for each in self.replicas]
        mesh = self.replicas[0].mesh
        for number, replica in enumerate(self.replicas):
            if replica.differs:
                warnings.warn(
                    f"on these chips bits are not those of one chip, and results say so (mesh {replica.mesh!r}): "
                    f"{replica.differs}",
                    stacklevel=3,
                )
            if replica.mesh != mesh:
                raise InputError(
                    f"replica {number} has mesh {replica.mesh!r}, replica 0 has mesh {mesh!r}: their bits differ, so use one "
                    "replica"
                )
        self._weight_version: str | None = None
        self._name_weights()

    @property
    def device(self) -> Device:
        """Weights, state and programs of the first replica."""
        return self.replicas[0].device

    @property
    def model(self) -> Model:
        """The model that it runs, as the first replica has it."""
        return self.device.model

    @property
    def certificates(self) -> dict[Plan, Certificate]:
        """Facts about each program of the first replica so far."""
        return self.replicas[0].planner.certificates

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do, or updates to return."""
        traffic = self._traffic
        return bool(traffic.inbox or traffic.queue or traffic.news or self._outbox or self.num_live)

    @property
    def num_places(self) -> int:
        """Most samples that run at once."""
        return len(self.replicas) * self.config.max_requests

    @property
    def num_pages(self) -> int:
        """Cache pages that requests share, those of all replicas."""
        return sum(replica.device.num_pages for replica in self.replicas)

    @property
    def num_live(self) -> int:
        """Samples that have a place on a device, or whose given texts are read there."""
        return sum(len(replica.in_flight) for replica in self.replicas)

    @property
    def num_tokens(self) -> int:
        """Tokens that all segments so far have committed."""
        return sum(replica.num_tokens for replica in self.replicas)

    @property
    def num_preemptions(self) -> int:
        """Number of times that a sample gave its pages back to be caught up with later."""
        return sum(replica.scheduler.num_preemptions for replica in self.replicas)

    @property
    def num_pages_held(self) -> int:
        """Cache pages that requests hold now."""
        return sum(replica.pool.num_held for replica in self.replicas)

    @property
    def acceptance_by_match_length(self) -> dict[int, float]:
        """Chance in the first replica that a draft of prompt lookup agreed after a match of so many tokens."""
        return self.device.acceptance_by_match_length

    @property
    def busy_s(self) -> float:
        """Seconds that the devices had a segment to run, all of them together."""
        return sum(replica.device.clock.busy_s for replica in self.replicas)

    @property
    def idle_s(self) -> float:
        """Seconds that the devices waited for the host between two segments, all of them together."""
        return sum(replica.device.clock.idle_s for replica in self.replicas)

    def fingerprint(self) -> dict[str, object]:
        """Everything but the request that committed bits may depend on; of an integer model no machine and no schedule."""
        version = {} if self._weight_version is None else {"weight_version": self._weight_version}
        if self.model.cfg.activation_bits is not None:
            return {"arithmetic": VERSIONS[self.model.cfg.activation_bits], "model": self.model.digest, **version}
        own = {"mesh": self.replicas[0].mesh, "model": self.model.digest, **version, "schedule": self.schedule.bits()}
        machine = fingerprint()
        options = compiler_options(self.schedule.numerics, machine["backend"])
        return {**machine, **({"options": options} if options else {}), **own}

    def request(
        self, prompt: str | Sequence[int], sampling: SamplingParams, *, id: str = "0", brings: Mapping[str, Any] = NOTHING
    ) -> Request:
        """Makes a prompt, text or token ids, a request that this engine takes; `brings` has values for its riders, by name.

        Raises `InputError` if the prompt is empty, too long, or holds ids outside the vocabulary, if it is text and the model
        has no tokenizer, or if `sampling` asks for more than the engine has room for.
        """
        return request_of(self.model, self.config, prompt, sampling, id=id, brings=brings)

    def add(self, request: Request, *, stream: bool = False, outbox: deque[Update] | None = None) -> None:
        """Queues a request and returns at once; `step` runs it and returns its updates.

        Args:
            request: the request; its `id` names it in updates and for `abort`; ids of requests in flight should differ.
            stream: updates come with each step that commits tokens, and steps are short; else one update at the end.
            outbox: gets the updates; None for the common outbox, which `step` returns by default.

        Raises:
            InputError: the request is unsound, does not fit this engine, see `request`, or brings a value that no rider takes.
        """
        request = check_request(self.model, self.config, request)
        outbox = self._outbox if outbox is None else outbox
        says = brought(self.device.riders, request)
        token_bytes = self.model.token_bytes
        self._traffic.inbox.extend([SequenceState(each, token_bytes, outbox, stream, says) for each in request.samples()])

    def abort(self, id: str) -> None:
        """Ends all samples of a request at the next step; their last updates hold what was committed, reason "abort"."""
        if self.agreement.aborts(id):
            self._traffic.inbox.append(id)

    def step(self, outbox: deque[Update] | None = None) -> list[Update]:
        """Starts a segment, and returns what the one before brought; an empty list if there is nothing to do.

        Updates are those for `outbox`, see `add`; those for others wait there.

        Raises `InputError` if a deterministic request is in flight and this device certifies no plan for it. Nothing is lost:
        abort such requests, and step on.
        """
        outbox = self._outbox if outbox is None else outbox
        self._is_stepping = True
        try:
            for replica, others in zip(self.replicas, self._others, strict=True):
                replica.collect()
                self._take_in()
                replica.go_on(others)
                self._hand_out()
        finally:
            self._is_stepping = False
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
        listed = listed_prompts(prompts)
        each = each_sampling(sampling, len(listed))
        requests = [self.request(p, s, id=str(i)) for i, (p, s) in enumerate(zip(listed, each, strict=True))]
        return sorted(self.run(requests), key=lambda completion: (int(completion.id), completion.index))

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
        listed = listed_prompts(texts, "texts")
        first = plain(starts)
        each = [first] * len(listed) if isinstance(first, int) else plain_ids(first, "starts")
        if len(each) != len(listed):
            raise InputError(f"{len(listed)} texts but {len(each)} starts: give one for all, or one each")
        sampling = SamplingParams(logprobs=1) if sampling is None else sampling
        numbered = enumerate(zip(listed, each, strict=True))
        requests = [to_score(self.model, self.config, number, text, start, sampling) for number, (text, start) in numbered]
        return sorted(self.run(requests), key=lambda completion: int(completion.id))

    def replay(self, records: Iterable[tuple[Request, Sequence[int]]]) -> Iterator[Replay]:
        """Yields what the canonical pass says of each request, of one sample, and its recorded tokens, in their order.

        It looks a few rounds of places ahead. Passes are large ones, if the device certifies that their bits are the anchor's.

        Raises `InputError` if a text does not fit `max_len`, or holds ids outside the vocabulary, and if it cannot be replayed.
        """
        self.prepare_replays()
        found: dict[int, Replay] = {}
        following = 0
        for completion in self.run(to_replay(records, LOOKAHEAD * self.num_places)):
            if completion.replay is None:
                raise InputError(f"{completion.id!r} cannot be replayed: {completion.error or completion.finish_reason}")
            found[completion.index] = completion.replay
            while following in found:
                yield found.pop(following)
                following += 1

    def prepare_replays(self) -> None:
        """Compiles what `replay` needs, and certifies large passes; `replay` does it by itself."""
        self._on_each(lambda replica: replica.prepare_replays())

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
            needs: programs that they need, all if None.
            first_only: no more than the first step waits for: one batch size, no drafts, nothing timed. The rest is made after
                four thousand passes, for the batches that these needed, unless all that was wanted has been prepared.

        Returns what is known of each program so far.

        Raises `InputError` if what a rider reads in prompts depends on places or drafts on this device.
        """
        share = None if num_requests is None else -(-num_requests // len(self.replicas))
        self._on_each(lambda replica: replica.preparation.ahead(share, needs or Needs(), first_only=first_only))
        return tuple(self.certificates.values())

    def prepare_behind(self, needs: Needs | None = None) -> None:
        """Makes one program that can run all that `needs` say, any requests if None; leaves the others to `go_on_preparing`.

        Processes that share a mesh make all of them at once, because each must make the same at the same time. Raises
        `InputError` if what a rider reads in prompts depends on places or drafts on this device.
        """
        self.compile_behind()
        if self.compiles_behind:
            self._on_each(lambda replica: replica.preparation.all_behind(needs or Needs()))
        else:
            self.prepare(needs=needs)

    def compile_behind(self) -> None:
        """From now on leaves what makes requests faster to `go_on_preparing`, but for processes that share a mesh."""
        for replica in self.replicas:
            replica.preparation.is_behind = isinstance(self.agreement, Alone)

    @property
    def compiles_behind(self) -> bool:
        """Whether what makes requests faster is compiled while they run; else in a step."""
        return self.replicas[0].preparation.is_behind

    def go_on_preparing(self) -> bool:
        """Tries a program that was compiled behind, if one is there and the time has come; returns whether it did.

        Call it between two steps. Requests in flight stand still meanwhile, and go on to the same bits; see `Preparation`. A
        program that cannot be compiled or tried is logged, and named by `not_made`; requests go on without it.
        """
        is_idle = not self.has_work
        return any(replica.preparation.go_on(is_idle=is_idle) for replica in self.replicas)

    @property
    def compiling(self) -> tuple[str, ...]:
        """Labels of what is being compiled behind, or will be: plans, and replays that say likeliest tokens."""
        return tuple(label for replica in self.replicas for label in replica.preparation.compiling)

    @property
    def not_made(self) -> tuple[str, ...]:
        """Labels of what could not be compiled or tried behind; the log has the tracebacks."""
        return tuple(label for replica in self.replicas for label in replica.planner.failed)

    @property
    def is_prepared(self) -> bool:
        """Whether nothing is being made behind."""
        return all(replica.preparation.behind is None for replica in self.replicas)

    def update_params(self, params: Params, weight_version: str | None = None) -> None:
        """Goes on with other weights of the same shapes; what pages hold is forgotten, nothing is compiled again.

        On its own device the engine reads the very arrays that it is given, without a copy: they stay the caller's, who must
        not donate them to a program while it has them. Weights that lie elsewhere are copied to where the first ones were; each
        of several replicas gets a copy on its own devices. A trainer that donates float32 weights to its next step gives the
        engine what `jax.jit(lambda params: jax.tree.map(jnp.copy, params))` returns.

        `weight_version` names them in fingerprints and digests. By default they are named by a digest of all weights, which
        takes as long as reading them. A model in int8 takes weights of its `cfg.dtype`, too, and rounds them;
        an integer model takes those of its `float_cfg`, and has the bits of one that is loaded with them.

        Raises `InputError` if requests are in flight, or a weight has another shape or dtype than the model's, or was deleted.
        Steps raise it if weights are deleted later.
        """
        self._take_in()
        if self.has_work:
            raise InputError("requests are in flight: finish or abort them before the weights change")
        params = fitted(params, self.model.cfg, self.model.float_cfg)
        digest = digest_model(self.model.cfg, params) if weight_version is None else ""
        for replica in self.replicas:
            replica.device.use(dataclasses.replace(self.model, params=params, digest=digest, source=""))
        self._weight_version = weight_version
        self._name_weights()

    def stop(self) -> list[Update]:
        """Drops all requests; returns the updates that were due, of the segment on the device too."""
        for replica in self.replicas:
            replica.stop()
        self._take_in()
        self._hand_out()
        for replica in self.replicas:
            replica.drop(lambda sequence: True)
            replica.rest()
        updates = list(self._outbox)
        self._outbox.clear()
        return updates

    def _take_in(self) -> None:
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

    def _on_each(self, act: Callable[[Replica], None]) -> None:
        """Calls `act` with each replica; several compile at the same time."""
        if len(self.replicas) == 1:
            act(self.replicas[0])
            return
        with ThreadPoolExecutor(len(self.replicas), thread_name_prefix="prepare") as threads:
            list(threads.map(act, self.replicas))

    def _updates(self, requests: Iterable[Request | None], *, stream: bool) -> Iterator[Update]:
        """Drives `requests` and yields their updates; when it is closed, so are they."""
        outbox: deque[Update] = deque()
        try:
            for updates in drive(self, requests, stream=stream, outbox=outbox):
                yield from updates
        finally:
            self._traffic.inbox.append(outbox)
            if not self._is_stepping and not self._is_ending():  # the garbage collector may close a driver at any moment
                self._take_in()

    def _name_weights(self) -> None:
        """Digests what the bits depend on, for completions and for the contents of pages, which are forgotten."""
        self._digest = hashlib.sha256(json.dumps(self.fingerprint(), sort_keys=True).encode()).hexdigest()
        for replica in self.replicas:
            replica.pool.clear(bytes.fromhex(self._digest))


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
