"""A device without a compiler, for tests of the host: it counts up, in numpy, and keeps what a real cache would hold.

The next token after `t` is `t + 1` modulo the vocabulary, with log-probability `-position / 64`; an ordinary request's
log-probability also depends on the batch, as on real devices. A page's slot holds the digest of all tokens up to it, written as
the sequence goes through it, and every step checks slots of a sequence below its length. So a page that is shared wrongly,
handed out twice or overwritten too early is found at once.
"""

import dataclasses
import hashlib
from concurrent.futures import Future
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from detspec.checkpoint.load import Model
from detspec.draft.table import drafters_of
from detspec.engine.decide import BusyClock
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Plan, Room, large_passes
from detspec.engine.programs import SequenceProgress
from detspec.generation.score import Replayed
from detspec.riders.counters import COUNTED
from detspec.sampling_params import all_stop_ids
from detspec.state import LENGTH, RUNNING, STOP
from tests.fakes import TABLE_CFG

FAKE_MODEL = Model(dataclasses.replace(TABLE_CFG, vocab_size=97, max_position=4096), {}, None, (), "counts up")


class FakeDevice:
    """Takes the place of `detspec.engine.device.Device`."""

    def __init__(
        self, schedule, config: EngineConfig, *, num_pages: int | None = None, drafters=None, model=FAKE_MODEL
    ) -> None:
        self.model, self.schedule, self.config = model, schedule, config
        self.large = large_passes(schedule, config.max_len)
        self.num_pages = num_pages or config.max_requests * self.max_pages
        self.drafters = drafters_of(drafters or {})
        self.clock, self.place, self.riders, self.reader = BusyClock(), None, (), None
        self.conforms = True
        self.room = Room(config.max_stop_ids, config.max_logit_bias)
        self.slots = np.zeros((self.num_pages + 1, schedule.numerics.page), np.uint64)  # page 0 is scratch
        self.places: dict[int, SimpleNamespace] = {}
        self.waiting: dict[int, SimpleNamespace] = {}
        self.wide_costs: dict[Plan, float] = {}
        self.behind: list[tuple[tuple[Plan, ...], Future]] = []  # plans that are compiled behind, and what is waited for
        self.steps_of: dict[str, int] = {}  # steps of each plan, by label

    @property
    def max_pages(self) -> int:
        return self.schedule.numerics.num_pages(self.config.max_len)

    def check_copies(self, report) -> None:
        """It has one chip."""

    @property
    def waits(self) -> bool:
        return bool(self.waiting)

    def put(self, entries) -> None:
        for entry in entries:
            prompt_len = entry.prompt_len or len(entry.tokens)
            self.waiting[entry.place] = SimpleNamespace(
                tokens=list(entry.tokens),
                logprobs=[0.0] * prompt_len + list(entry.logprobs),
                length=entry.length,
                num_put=len(entry.tokens),
                limit=prompt_len + entry.sampling.max_tokens,
                stop_ids=all_stop_ids(entry.sampling, ()),
                sampling=entry.sampling,
                finish=RUNNING,
                num_passes=0,
                num_accepted=0,
                is_made_up=entry.sampling.ignore_eos,  # as probes are: their pages hold what others wrote
            )

    def prefill(self, placement, passes, *, schedule=None, answers=False):
        self.places |= self.waiting
        self.waiting = {}
        rows = int(passes) * self.schedule.budget.rows
        for place in np.flatnonzero(placement.in_use).tolist():
            held = self.places[place]
            lacks = held.finish == RUNNING and held.length < len(held.tokens) - 1
            while rows and held.length < len(held.tokens) - 1:
                self._write(placement, place, held.length)
                held.length += 1
                rows -= 1
            if answers and lacks and rows:
                self._commit(placement, place, 1)
                held.num_passes += 1
                rows -= 1
        self.clock.work()
        return self._report(placement.of_all.chosen.tolist(), 0)

    def step(self, plan, placement, limits, *, wide_cost=None):
        chosen = [int(place) for place in placement.chosen]
        assert len(set(chosen)) == len(chosen) == plan.batch
        in_use = [place for place in chosen if placement.in_use[place]]
        steps = idle = 0
        begun = {place: len(self.places[place].tokens) for place in in_use}

        def gain() -> int:
            return max((len(self.places[place].tokens) - begun[place] for place in in_use), default=0)

        while steps < limits.steps and idle < limits.max_idle and gain() <= limits.max_gain:
            ready = [p for p in in_use if self.places[p].finish == RUNNING]
            if len(ready) < limits.min_live:
                break
            for place in ready:
                self._gain(plan, placement, place)
            steps += 1
            idle += sum(self.places[place].finish != RUNNING for place in in_use)
        self.steps_of[plan.label] = self.steps_of.get(plan.label, 0) + steps
        self.clock.work()
        return self._report(chosen, steps)

    prefill_all = prefill
    may_prefill_apart = prefills_apart = may_answer = answers = shares_pages = True
    may_prefill_large = False
    acceptance_by_match_length: ClassVar[dict[int, float]] = {}

    def widen(self, room):
        self.clear()  # what is still in a place is lost, and missed
        self.room = room

    def use(self, model):
        self.model = model

    def start_compiling(self, plans, *, apart=False):
        """Compiles nothing."""

    def compile_behind(self, plans, *, apart=False):
        """Plans are compiled once a test says so."""
        self.behind.append((plans, Future()))
        return self.behind[-1][1]

    def compile_replays(self):
        """As plans."""
        return self.compile_behind(())

    def compiled(self):
        """Says that what is compiled behind is there; returns its plans."""
        plans, future = self.behind[-1]
        if not future.done():
            future.set_result(None)
        return [plan.label for plan in plans] or ["no plan"]

    def replay(self, placement, texts, asked, *, entries=(), schedule=None):
        shape = (self.config.max_requests, self.config.max_len)
        targets, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for place in np.flatnonzero(placement.in_use).tolist():
            tokens, start, _ = texts[place]
            is_made_up = place in self.places and self.places[place].is_made_up  # as probes are, which are replayed
            for position in range(len(tokens)):
                page, slot = self._slot(placement, place, position)
                content = self._canonical(tokens[: position + 1])
                assert position >= start or is_made_up or self.slots[page, slot] == content, f"{position} of {place} is lost"
                if position >= start and (position < len(tokens) - 1 or asked.choose):
                    assert page != 0, "a text writes to a page that was handed to it"
                    self.slots[page, slot] = content
            for position in range(start, len(tokens)):
                targets[place, position + 1 : position + 2] = self.next_token(tokens[: position + 1])
            logprobs[place] = -np.arange(shape[1]) / 64
        top = np.zeros((*shape, asked.top_k), np.int32)
        self.clock.work()
        targets_of = {"targets": targets, "target_logprobs": logprobs} if asked.choose else {}
        found = {"targets": None, "target_logprobs": None, **targets_of}
        return Replayed(logprobs=logprobs, top_ids=top, top_logprobs=top.astype(np.float32), **found)

    def copy(self, pairs) -> None:
        for source, target in pairs:
            self.slots[target] = self.slots[source]

    def wait(self) -> None:
        pass

    def clear(self) -> None:
        self.places, self.waiting = {}, {}

    def told(self) -> None:
        return None

    def next_token(self, tokens: list[int]) -> int:
        """The token after `tokens`."""
        return (tokens[-1] + 1) % self.model.cfg.vocab_size

    def _gain(self, plan, placement, place: int) -> None:
        """Takes a step of a sequence: writes the slot of its last token, and commits a token, or a window of them."""
        held = self.places[place]
        if held.length < len(held.tokens) - 1:  # catching up: windows of a pass take it along
            self._write(placement, place, held.length)
            held.length += 1
            return
        for position in range(0, held.length, 7):  # some of what it has to find
            self._check(placement, place, position)
        before = len(held.tokens)
        self._commit(placement, place, plan.most_tokens, off=0.0 if held.sampling.deterministic else plan.batch / 1024)
        held.num_passes += not plan.ordinary
        held.num_accepted += len(held.tokens) - before - 1

    def _commit(self, placement, place: int, most: int, *, off: float = 0.0) -> None:
        """Commits at most so many tokens of a sequence; log-probabilities are so far from canonical ones."""
        held = self.places[place]
        for _ in range(most):
            self._write(placement, place, held.length)
            held.length += 1
            position = len(held.tokens)
            held.tokens.append(self.next_token(held.tokens))
            held.logprobs.append(-position / 64 - off)
            if held.tokens[-1] in held.stop_ids:
                held.finish = STOP
            elif len(held.tokens) == held.limit:
                held.finish = LENGTH
            if held.finish != RUNNING:
                break

    def _slot(self, placement, place: int, position: int) -> tuple[int, int]:
        page = self.schedule.numerics.page
        return int(placement.page_table[place, position // page]), position % page

    def _content(self, place: int, position: int) -> int:
        held = self.places[place]
        # What the canonical pass writes depends on the tokens alone; what ordinary decoding writes may not be shared.
        is_canonical = held.sampling.deterministic or position < held.num_put - 1
        return self._canonical(held.tokens[: position + 1], own=b"" if is_canonical else str(id(held)).encode())

    @staticmethod
    def _canonical(tokens, own: bytes = b"") -> int:
        return int.from_bytes(hashlib.sha256(np.asarray(tokens, np.int32).tobytes() + own).digest()[:8], "little")

    def _write(self, placement, place: int, position: int) -> None:
        page, slot = self._slot(placement, place, position)
        assert page != 0, "a sequence writes to a page that was handed to it"
        self.slots[page, slot] = self._content(place, position)

    def _check(self, placement, place: int, position: int) -> None:
        page, slot = self._slot(placement, place, position)
        is_lost = self.slots[page, slot] != self._content(place, position)
        assert not is_lost or self.places[place].is_made_up, f"position {position} of place {place} is lost"

    def _report(self, chosen: list[int], steps: int):
        max_len = self.config.max_len
        tokens, logprobs = np.zeros((len(chosen), max_len), np.int32), np.zeros((len(chosen), max_len), np.float32)
        committed, length, finish, passes, accepted = (np.zeros(len(chosen), np.int32) for _ in range(5))
        for i, place in enumerate(chosen):
            held = self.places.get(place)
            if held is not None:
                tokens[i, : len(held.tokens)], logprobs[i, : len(held.tokens)] = held.tokens, held.logprobs
                committed[i], length[i], finish[i] = len(held.tokens), held.length, held.finish
                passes[i], accepted[i] = held.num_passes, held.num_accepted
        counts = np.zeros((len(passes), len(COUNTED)), np.int32)
        counts[:, COUNTED.index("num_verify_passes")] = passes
        counts[:, COUNTED.index("num_accepted_draft_tokens")] = accepted
        progress = SequenceProgress(np.full_like(passes, steps), committed, length, finish, counts)
        return SimpleNamespace(progress=progress, tokens=tokens, logprobs=logprobs, told=None, is_ready=False)
