"""The seam between host and device: one object owns the weights, the state, the programs and the clock.

The engine and trial runs drive it by `put`, `prefill`, `step`, `replay`, `copy` and `clear`. None of these waits
for the device; a `Report` does when it is read.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from detspec.cache import SCRATCH_PAGE, check_seats, filled, shares_pages
from detspec.checkpoint.load import Model
from detspec.compile_cache import user_cache
from detspec.draft.ngram import acceptance_by_match_length
from detspec.draft.source import Drafter, DraftParams
from detspec.draft.table import drafters_of
from detspec.engine.bits import differing_copies
from detspec.engine.compiled import PROGRAMS, Executable, ProgramCall
from detspec.engine.decide import BusyClock
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import WORTH_LARGER, Plan, Room, as_large, large_passes
from detspec.engine.programs import (
    Decoding,
    Placement,
    PrefillWork,
    ReadWork,
    Report,
    StepParams,
    Texts,
    copy_pages,
    prefill_sequences,
    read_sequences,
    run_segment,
)
from detspec.environment import chosen_schedule
from detspec.errors import DivergenceError, InputError
from detspec.generation.init import init_riders, init_state
from detspec.generation.insert import no_requests, pack_requests
from detspec.generation.loop import NEVER, Limits
from detspec.generation.score import Asked, Replayed
from detspec.mesh import COPIES, STATE, Place, made, param_specs, place_of, put
from detspec.model.dense import has_longer_texts
from detspec.model.params import Params
from detspec.ops.implementations import begin_kernels, operations
from detspec.riders.rider import Capacity, Entry, Reader, Rider
from detspec.riders.riding import Riders, reader_of
from detspec.sampling_params import MAX_LOGPROBS
from detspec.schedule import Schedule
from detspec.state import NO_DRAFT_STATE, DraftState
from detspec.thinking.rider import thinking_rider

PLAIN = Asked(processing=False, choose=True, top_k=0)  # as certificates need it; prefill takes the same program


class GivenText(NamedTuple):
    """A text that is replayed."""

    tokens: Sequence[int] | np.ndarray
    start: int  # first position to feed
    wanted_from: int  # first position that is asked about


class Device:
    """A model on the device, with places for `config.max_requests` sequences.

    Attributes:
        model: the weights that it runs, see `use`.
        schedule: anchor of all canonical passes.
        config: capacities, and how thoughts are drafted.
        num_pages: cache pages that sequences share.
        room: how many stop tokens and biased tokens a request may have, see `widen`.
        clock: how long the device worked, and waited for the host.
        state: all sequences; every program takes it and gives the next one.
        riders: riders besides sampling and counters: requests may bring values for them, and they may read prompts.
        place: place of the weights and of the state: a mesh of chips, or one device.
        cache: files of compiled programs; None if none are kept.
        conforms: whether an integer model has the bits of all devices here, see `check_conformance`; on CPUs that is taken for
            granted.
        wide_costs: for plans that skip, time of a step whose pass reads drafts over that of a plain step.
        shares_pages: whether the cache holds all positions of a text by pages. Where a layer keeps states by seat, sequences
            share nothing, a text is replayed from its beginning, and drafts are at most a page long: a rollback reaches no
            farther.
        may_prefill_apart: whether prefill may have a program of its own. XLA cuts the sums of a product by what else its
            program works out, so both programs give keys and values the same bits only with pinned products, or with weights
            in int8: then every product of a pass, the head's too, is an exact sum of integers.
        prefills_apart: whether it has one. Else it takes that of the replays, which is one less to compile, but works out the
            last layer, too, unless the schedule's products leave out rows.
        large: schedule of large passes over given texts.
        may_prefill_large: whether a program that prefills by them is worth making: with an own one, where so many rows fit into
            the cache. Not where a rider reads prompts, chunk by chunk.
        prefills_large: whether it is made and certified.
        answers: whether passes over prompts are certified to give the token after each, too; see `may_answer`.
    """

    def __init__(
        self, model: Model, config: EngineConfig, *, drafters: Mapping[str, Drafter] | None = None, riders: Sequence[Rider] = ()
    ) -> None:
        """Allocates the cache.

        Raises `InputError` if the device does not run the schedule, or config, drafters, riders and model do not fit together.
        """
        if config.max_len > model.cfg.max_position:
            longer = "; loaded with long_texts=True (--long-texts) it has more" if has_longer_texts(model.cfg) else ""
            raise InputError(
                f"max_len {config.max_len} exceeds the {model.cfg.max_position} positions that the model was made for{longer}"
            )
        self.config = config
        self.schedule = chosen_schedule(config.schedule, model.cfg)
        begin_kernels(model.cfg, self.schedule.numerics)
        self.num_pages = config.max_requests * self.max_pages if config.num_pages is None else config.num_pages
        if self.num_pages < config.max_requests:
            raise InputError(
                f"num_pages ({self.num_pages}) must be at least max_requests ({config.max_requests}): a page for each of them"
            )
        self.clock = BusyClock()
        self.place: Place = place_of(model.cfg, model.params)
        self.model = moved(model, self.place)
        self.drafters = drafters_of(
            drafters or {}, prompt_lookup_min=config.prompt_lookup_min, prompt_lookup_max=config.prompt_lookup_max
        )
        if "int8" in config.methods and model.cfg.weights is not None:
            raise InputError('the model itself is in int8, so the draft "int8" would be no faster: choose "auto" or "ngram"')
        if isinstance(self.place, Mesh) and (own := [name for name, drafter in self.drafters.items() if drafter.params != ()]):
            raise InputError(
                f"drafter {own[0]!r} has weights of its own, which are not cut over chips; on {self.place.size} chips use "
                'the draft "ngram", "int8", "self" or "none"'
            )
        self.shares_pages = shares_pages(model.cfg, self.schedule.numerics)
        if model.cfg.is_integer and riders:
            raise InputError(f"rider {riders[0].name!r} works on floats, which an integer model has none of")
        drafts = any(name != "none" for name in config.methods)
        check_seats(model.cfg, self.schedule.numerics, config.num_speculative_tokens if drafts else 0)
        self.room = Room(config.max_stop_ids, config.max_logit_bias)
        init = partial(
            init_state,
            model.cfg,
            max_requests=config.max_requests,
            max_len=config.max_len,
            max_stop_ids=self.room.stop_ids,
            max_logit_bias=self.room.logit_bias,
            schedule=self.schedule,
            num_pages=self.num_pages,
        )
        thinks = model.cfg.thinking is not None
        self.riders = (*((thinking_rider(config.thoughts),) if thinks else ()), *riders)
        if isinstance(self.place, Mesh) and (own := [rider.name for rider in self.riders if rider.linear is not None]):
            raise InputError(f"rider {own[0]!r} works on products, which are cut over {self.place.size} chips: use one chip")
        self.state = made(lambda: init().replace(riders=self._init_riders()), self.place, STATE)
        self._draft_states: dict[str, DraftState] = {}
        self._derived: dict[str, DraftParams] = {}  # weights of draft sources that are made from the model's
        self._no_requests = put(no_requests(self.state), self.place)
        self._no_texts = put(_no_texts(config), self.place)
        self._entries: dict[int, Entry] = {}  # by place; the next prefill puts them in, as `_requests`
        self._requests = self._no_requests
        self.cache = user_cache() if config.compile_cache else None
        self.conforms = not model.cfg.is_integer or jax.devices()[0].platform == "cpu"
        self._programs: dict[Hashable, Executable] = {}
        self._decodings: dict[Plan, Decoding] = {}
        self.wide_costs: dict[Plan, float] = {}
        self.may_prefill_apart = self.schedule.numerics.linear == "pinned" or model.cfg.weights is not None
        self.prefills_apart = self.may_prefill_apart
        self.large = large_passes(self.schedule, config.max_len)
        is_larger = self.large.budget.rows >= WORTH_LARGER * self.schedule.budget.rows
        is_filled = config.max_requests * config.max_len >= self.large.budget.rows
        self.may_prefill_large = self.may_prefill_apart and is_larger and is_filled and reader_of(self.riders) is None
        self.prefills_large = False
        self.answers = False

    def use(self, model: Model) -> None:
        """Goes on with other weights of the same shapes, wherever they lie: they are put where those before are.

        Raises `InputError` if some have been deleted.
        """
        check_alive(model.params)
        self.model = moved(model, self.place)
        self._derived.clear()

    def widen(self, room: Room) -> None:
        """Gives each request `room`: programs are others from now on. All places must be free."""
        self.room = room
        self.state = self.state.replace(riders=put(self._init_riders(), self.place))
        self._no_requests = put(no_requests(self.state), self.place)
        self._take_out()
        self._programs.clear()

    def _init_riders(self) -> Riders:
        """The riders of places without requests."""
        capacity = Capacity(self.config.max_requests, self.config.max_len, *self.room, self.schedule)
        return init_riders(self.model.cfg, capacity, self.riders)

    @property
    def max_pages(self) -> int:
        """Pages that one sequence can hold."""
        return self.schedule.numerics.num_pages(self.config.max_len)

    @property
    def waits(self) -> bool:
        """Whether requests were put that no prefill has taken in yet."""
        return bool(self._entries)

    @property
    def may_answer(self) -> bool:
        """Whether passes over prompts can give the token after each: in a program of their own, at no cost of other rows."""
        return self.may_prefill_apart and operations(self.schedule.numerics).leaves_out_rows

    def put(self, entries: Sequence[Entry]) -> None:
        """Hands over requests; they enter their places with the next prefill. If one cannot be packed, none is handed over."""
        if entries:
            waiting = self._entries | {entry.place: entry for entry in entries}
            self._requests = pack_requests(self.state, list(waiting.values()), self.model.eos_ids)
            self._entries = waiting

    def prefill(
        self, placement: Placement, passes: int, *, schedule: Schedule | None = None, answers: bool = False
    ) -> Report | None:
        """Starts at most `passes` canonical passes over what places in use lack; `schedule` is the device's own if None.

        Returns a report on all places, first those in `placement.chosen`; None where prefill has no program of its own. If it
        `answers`, which takes a device that `may_answer`, sequences that have caught up have their next token, too.
        """
        assert not answers or (self.may_answer and self.prefills_apart)
        apart = self.prefills_apart
        work = ReadWork(self._requests, placement.of_all, np.int32(passes), self._no_texts)
        call = self._prefill(placement, passes, schedule, answers=answers) if apart else self._read(work, schedule, PLAIN)
        self._take_out()
        self.state, found = self._run(call)
        self.clock.work()
        return found if apart else None

    def prefill_all(self, placement: Placement, passes: int, *, answers: bool = False) -> Report | None:
        """As `prefill` where so many passes read whole prompts; large ones take the place of several if they are certified."""
        num_large = 0
        report = None
        if self.prefills_large:
            num_large, passes = as_large(passes, self.large.budget.rows // self.schedule.budget.rows)
        if num_large:
            report = self.prefill(placement, num_large, schedule=self.large, answers=answers)
        if passes:
            report = self.prefill(placement, passes, answers=answers)
        return report

    def step(self, plan: Plan, placement: Placement, limits: Limits, *, wide_cost: float | None = None) -> Report:
        """Starts a segment of steps of `plan` over the places `placement.chosen`, as many as the plan's batch.

        If the plan skips, `wide_cost` weighs its two passes, see `verify`; None is what is in `wide_costs`.
        """
        self.state, report = self._run(self._step(plan, placement, limits, wide_cost), plan.batch)
        if not plan.ordinary:
            self._draft_states[plan.draft] = self.state.draft
            self.state = self.state.replace(draft=NO_DRAFT_STATE)
        self.clock.work()
        return report

    def replay(
        self,
        placement: Placement,
        texts: Mapping[int, GivenText],
        asked: Asked,
        *,
        entries: Sequence[Entry] = (),
        schedule: Schedule | None = None,
    ) -> Replayed:
        """Starts canonical passes over `texts`, which all places in use have; `entries` say how those are read that are new."""
        packed = _no_texts(self.config)
        for place, text in texts.items():
            packed.tokens[place, : len(text.tokens)] = text.tokens
            packed.length[place] = len(text.tokens)
            packed.start[place] = text.start if self.shares_pages else 0
            packed.wanted_from[place] = text.wanted_from
        requests = pack_requests(self.state, entries, self.model.eos_ids) if entries else self._no_requests
        work = ReadWork(requests, placement.of_all, np.int32(NEVER), packed)
        self.state, replayed = self._run(self._read(work, schedule, asked))
        self.clock.work()
        return replayed

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages `(source, target)`, at most one for each place."""
        self.state = self._run(self._copy(pairs))

    def start_compiling(self, plans: Sequence[Plan], *, apart: bool = False) -> None:
        """Begins to compile, all at the same time, the first of `plans`, what it needs to be certified, and the others."""
        for call in self.calls(plans, apart=apart):
            PROGRAMS.start(call, self.cache)

    def compile_behind(self, plans: Sequence[Plan], *, apart: bool = False) -> Future[None]:
        """Compiles what `plans` need while others run, see `calls`; done when all are there."""
        return PROGRAMS.start_behind(self.calls(plans, apart=apart), self.cache)

    def compile_replays(self) -> Future[None]:
        """Compiles, while others run, the replays that say likeliest tokens and log-probabilities of given texts."""
        vocab_size = self.model.cfg.vocab_size
        each = [Asked.likeliest(processing, most, vocab_size) for processing in (True, False) for most in (1, MAX_LOGPROBS)]
        return PROGRAMS.start_behind([self._read(self._nothing(), None, asked) for asked in each], self.cache)

    def calls(self, plans: Sequence[Plan], *, apart: bool = False) -> list[ProgramCall]:
        """The programs that `plans` need, in the order in which they are needed.

        Prefill's own are among them as far as it has them, or is to have them: `apart`.
        """
        nothing = self._nothing()
        steps = [
            self._step(plan, nothing.placement._replace(chosen=np.zeros(plan.batch, np.int32)), Limits(0)) for plan in plans
        ]
        own = self.prefills_apart or (apart and self.may_prefill_apart)
        reads = []
        if plans and not (own and all(plan.ordinary for plan in plans)):
            reads.append(self._read(nothing, None, PLAIN))
        if plans and own:
            reads.append(self._prefill(nothing.placement, 0, None))
        if apart and self.may_prefill_large:
            reads.append(self._prefill(nothing.placement, 0, self.large))
        return [*steps[:1], *reads, *([self._copy([])] if plans else []), *steps[1:]]

    def _nothing(self) -> ReadWork:
        """ReadWork on no sequence, in the shapes of all work."""
        B = self.config.max_requests
        nowhere = Placement(np.zeros((B, self.max_pages), np.int32), np.zeros(B, bool), np.arange(B, dtype=np.int32))
        return ReadWork(self._no_requests, nowhere, np.int32(0), self._no_texts)

    def check_copies(self, report: Report) -> None:
        """Raises `DivergenceError` if this process's chips hold other bits of a report, of which each has a copy."""
        for leaf in jax.tree.leaves(report):
            if differs := differing_copies(leaf):
                raise DivergenceError(f"{differs}: a chip or a link is at fault, so what was generated cannot be trusted")

    def wait(self) -> None:
        """Waits until the device has nothing left to do."""
        jax.block_until_ready(self.state)

    def clear(self) -> None:
        """Takes all sequences out of their places."""
        self._take_out()
        self.state = self.state.replace(live=put(filled(self.config.max_requests, False, bool), self.place))

    def _take_out(self) -> None:
        """Forgets the requests that wait to be put in."""
        self._entries = {}
        self._requests = self._no_requests

    @property
    def reader(self) -> Reader | None:
        """How a rider reads prompts, if one does."""
        return self.state.riders.reader

    def read(self) -> Any:
        """A copy of the state of the rider that reads prompts; None if there is none."""
        return jax.tree.map(jnp.copy, self.state.riders.read_by_rider)

    def told(self) -> jax.Array | None:
        """A copy of what that rider reports."""
        return jax.tree.map(jnp.copy, self.state.riders.told)

    def _prefill(self, placement: Placement, passes: int, schedule: Schedule | None, *, answers: bool = False) -> ProgramCall:
        work = PrefillWork(self._requests, placement.of_all, np.int32(passes), np.bool_(answers))
        args = (self.model.params, self.state, work)
        return ProgramCall(prefill_sequences, self.model.cfg, args, {"schedule": schedule or self.schedule}, (STATE, COPIES))

    def _read(self, work: ReadWork, schedule: Schedule | None, asked: Asked) -> ProgramCall:
        static: dict[str, Hashable] = {"schedule": schedule or self.schedule, "asked": asked}
        return ProgramCall(read_sequences, self.model.cfg, (self.model.params, self.state, work), static, (STATE, COPIES))

    def _step(self, plan: Plan, placement: Placement, limits: Limits, wide_cost: float | None = None) -> ProgramCall:
        state = self.state if plan.ordinary else self.state.replace(draft=self.draft_state(plan.draft))
        cost = self.wide_costs.get(plan, 1.0) if wide_cost is None else wide_cost  # until it is timed: rows are free
        weights = StepParams(self.model.params, () if plan.ordinary else self._draft_params(plan.draft))
        args = (weights, state, placement, Limits(*map(np.int32, limits)), np.float32(cost))
        return ProgramCall(run_segment, self.model.cfg, args, {"decoding": self._decoding(plan)}, (STATE, COPIES))

    def _decoding(self, plan: Plan) -> Decoding:
        """The static arguments of the steps of `plan`."""
        if plan not in self._decodings:
            schedule = self.schedule if plan.ordinary else self.schedule.with_budget(plan.budget.rows, plan.budget.window)
            source = None if plan.ordinary else self.drafters[plan.draft].source
            self._decodings[plan] = Decoding(schedule, source, plan.num_drafts, plan.narrow, plan.processing)
        return self._decodings[plan]

    def _draft_params(self, name: str) -> DraftParams:
        """The weights of the draft source called `name`; they are made when they are first needed."""
        drafter = self.drafters[name]
        if drafter.source.derive is None:
            return drafter.params
        if name not in self._derived:
            self._derived[name] = drafter.source.derive(self.model.params, self.model.cfg)
        return self._derived[name]

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> ProgramCall:
        nothing = [(SCRATCH_PAGE, SCRATCH_PAGE)] * (self.config.max_requests - len(pairs))
        source, target = np.asarray([*pairs, *nothing], np.int32).T
        static: dict[str, Hashable] = {"numerics": self.schedule.numerics}
        return ProgramCall(copy_pages, self.model.cfg, (self.state, source, target), static, STATE)

    def _run(self, call: ProgramCall, batch: int = 0) -> Any:
        """Runs the program of `call`. Of its shapes, only `batch` differs between calls with the same static arguments."""
        key = (call.fn, batch, *call.static.values())
        if key not in self._programs:
            self._programs[key] = PROGRAMS.start(call, self.cache).result()
        return self._programs[key](*call.args)

    @property
    def acceptance_by_match_length(self) -> dict[int, float]:
        """Chances that prompt lookup has found so far, see `detspec.draft.ngram`; nothing if it has not run."""
        state = self._draft_states.get("ngram")
        return {} if state is None else acceptance_by_match_length(state)

    def draft_state(self, name: str) -> DraftState:
        """State that the draft source called `name` keeps between steps."""
        if name not in self._draft_states:
            source = self.drafters[name].source
            self._draft_states[name] = put(source.init(self.model.cfg, self.schedule, self.state), self.place)
        return self._draft_states[name]


def check_alive(params: Params) -> None:
    """Raises `InputError` if some of `params` have been deleted, as jax does with arrays that are donated to a program."""
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(params)):
        raise InputError(
            "the engine's weights have been deleted: it reads the arrays that it was given, without a copy, and these were "
            "donated to a program (donate_argnums); give update_params weights that you do not donate, such as "
            "jax.tree.map(jnp.copy, params)"
        )


def moved(model: Model, place: Place) -> Model:
    """`model` with its weights at `place`; those that lie there already share their memory with the caller's."""
    return dataclasses.replace(model, params=put(model.params, place, param_specs(model.cfg)))


def _no_texts(config: EngineConfig) -> Texts:
    """Makes texts without anything to replay, in numpy."""
    B = config.max_requests
    return Texts(np.zeros((B, config.max_len), np.int32), *np.zeros((3, B), np.int32))
