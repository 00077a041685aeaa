"""Rows and pages after any sequence of admissions, growth, preemptions, ends and aborts: none leaked, none owned twice."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from detspec.cache import SCRATCH_PAGE
from detspec.engine.allocator import Allocator
from detspec.engine.pages import PagePool, partial_key, prefix_keys
from detspec.engine.request import Request
from detspec.engine.scheduler import Scheduler
from detspec.engine.sequence import SequenceState
from detspec.sampling_params import SamplingParams

PAGE, MAX_PAGES, MAX_ROWS, WINDOW = 4, 6, 4, 2
CONTEXT = b"weights"


def scheduler_of(num_pages: int, *, sharing: bool = True) -> Scheduler:
    pool = PagePool(num_pages)
    allocator = Allocator(pool, page=PAGE, max_requests=MAX_ROWS, max_pages=MAX_PAGES, sharing=sharing)
    return Scheduler(allocator, max_requests=MAX_ROWS, window=WINDOW, chunk=4)


def request_of(id: str, prompt: list[int], max_tokens: int = 4, **sampling) -> Request:
    return Request(id, tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling))


class Life(RuleBasedStateMachine):
    """Random lives of requests over few tokens, so that many prompts begin alike; `step` plays the device."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler_of(num_pages=9)
        self.requests: list[Request] = []
        self.scheduler.feed(iter(self.arrivals()))
        self.written: dict[int, list[tuple[int, ...] | None]] = {}  # page -> for each slot, all tokens up to it
        self.number = 0

    @property
    def pool(self) -> PagePool:
        return self.scheduler.allocator.pool

    def arrivals(self):
        while True:
            if not self.requests:
                return
            yield self.requests.pop(0)

    @rule(
        prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=4),
        max_tokens=st.integers(1, 8),
        n=st.integers(1, 3),
        deterministic=st.booleans(),
        thinking=st.booleans(),
    )
    def arrive(self, prompts, max_tokens, n, deterministic, thinking):
        for prompt in prompts:
            self.number += 1
            self.requests.append(
                request_of(str(self.number), prompt, max_tokens, n=n, deterministic=deterministic, thinking=thinking)
            )
        if not self.scheduler.waiting:
            self.scheduler.feed(iter(self.arrivals()))

    @rule()
    def admit(self):
        admitted = self.scheduler.admit(CONTEXT)
        for sample, (source, target) in zip(admitted.samples, admitted.copies, strict=True):
            if source != SCRATCH_PAGE:
                self.written[target] = list(self.written[source])
            assert not (sample.thinks and sample.length), "whoever thinks reads everything"
            for position in range(sample.length):  # what it takes for known is there
                assert self.slots(sample, position)[position % PAGE] == tuple(sample.tokens[: position + 1])

    @precondition(lambda self: self.scheduler.samples)
    @rule(gain=st.integers(1, 6), data=st.data())
    def step(self, gain, data):
        """Pages for `gain` tokens, or the youngest goes; then every row catches up or gains tokens, all of them 7."""
        while not self.scheduler.affordable(gain, 1):
            assert len(self.scheduler.samples) > 1, "the oldest is never preempted"
            self.scheduler.preempt(CONTEXT)
        gain = self.scheduler.affordable(gain, 1)
        self.scheduler.reserve(gain)
        for sample in self.scheduler.samples:
            if sample.behind:
                reached = min(sample.length + data.draw(st.integers(1, 8)), sample.committed - 1)
            else:
                for _ in range(data.draw(st.integers(1, gain))):
                    if sample.committed < sample.limit:
                        sample.tokens.append(7)
                        sample.committed += 1
                reached = sample.committed - 1
            for position in range(sample.length, reached):
                slots = self.slots(sample, position)
                assert self.pool._holders[sample.pages[position // PAGE]] == 1, "nobody writes what others hold"
                # Of a prompt that is read thinking, keys and values are not those of its tokens.
                written = tuple(sample.tokens[: position + 1])
                slots[position % PAGE] = ("thinking", *written) if sample.thinks else written
            sample.length = reached
            self.scheduler.allocator.register(sample)

    @precondition(lambda self: self.scheduler.samples)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        self.scheduler.remove(data.draw(st.sampled_from(self.scheduler.samples)), CONTEXT, keep=keep)

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def abort(self, data):
        id = str(data.draw(st.integers(1, self.number)))
        gone = self.scheduler.abort(id, CONTEXT)
        assert all(sample.row is None and not sample.pages for sample in gone)
        assert not any(sample.request.id == id for sample in self.scheduler.samples)

    @rule()
    def other_weights(self):
        for sample in list(self.scheduler.samples):
            self.scheduler.remove(sample, CONTEXT, keep=True)
        self.pool.clear()
        assert self.pool.num_available == self.pool.num_pages

    @invariant()
    def every_page_is_in_one_place(self):
        free, kept, held = list(self.pool._free), list(self.pool._kept), list(self.pool._holders)
        assert sorted(free + kept + held) == list(range(1, self.pool.num_pages + 1))
        listed = Counter(page for sample in self.scheduler.samples for page in sample.pages)
        assert listed == Counter(self.pool._holders)

    @invariant()
    def page_table_lists_the_pages_of_the_rows(self):
        table = self.scheduler.allocator.page_table
        rows = {sample.row: sample.pages for sample in self.scheduler.samples}
        assert len(rows) == len(self.scheduler.samples)
        for row in range(MAX_ROWS):
            pages = rows.get(row, [])
            assert table[row].tolist() == pages + [SCRATCH_PAGE] * (MAX_PAGES - len(pages))

    @invariant()
    def nobody_waits_for_a_page_that_nobody_fills(self):
        assert all(sample in self.scheduler.samples for sample in self.scheduler.allocator._filling.values())

    def slots(self, sample: SequenceState, position: int) -> list[tuple[int, ...] | None]:
        return self.written.setdefault(sample.pages[position // PAGE], [None] * PAGE)

    def teardown(self):
        self.scheduler.clear(CONTEXT)
        assert self.pool.num_held == 0
        assert self.pool.num_available == self.pool.num_pages


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_any_life_of_requests_leaks_no_page_and_shares_only_what_is_written = Life.TestCase


def run_prefill(scheduler: Scheduler) -> None:
    """All rows catch up."""
    for sample in scheduler.samples:
        sample.length = sample.committed - 1
        scheduler.allocator.register(sample)


def test_samples_of_one_prompt_wait_for_the_first_and_then_share_all_of_it():
    """10 prompt tokens: pages [0 4) [4 8) are shared, the 9th token's page is copied; the 10th token is the first input."""
    scheduler = scheduler_of(num_pages=20)
    scheduler.feed(iter([request_of("a", list(range(10)), n=3), request_of("b", [5])]))
    first = scheduler.admit(CONTEXT).samples
    assert [(s.request.id, s.request.index) for s in first] == [("a", 0), ("b", 0)]  # b passes those who wait
    assert scheduler.admit(CONTEXT).samples == ()
    run_prefill(scheduler)
    admitted = scheduler.admit(CONTEXT)
    assert [(s.request.id, s.request.index) for s in admitted.samples] == [("a", 1), ("a", 2)]
    leader = first[0]
    for sample, copy in zip(admitted.samples, admitted.copies, strict=True):
        assert sample.pages[:2] == leader.pages[:2]
        assert copy == (leader.pages[2], sample.pages[2])
        assert sample.pages[2] != leader.pages[2]
        assert sample.length == 9


def test_without_sharing_nobody_waits_and_nothing_is_shared():
    scheduler = scheduler_of(num_pages=20, sharing=False)
    scheduler.feed(iter([request_of("a", list(range(10)), n=3)]))
    samples = scheduler.admit(CONTEXT).samples
    assert len({page for sample in samples for page in sample.pages}) == sum(len(sample.pages) for sample in samples)
    assert [sample.length for sample in samples] == [0, 0, 0]


def test_whole_pages_of_canonical_tokens_are_found_again_and_ordinary_ones_are_not():
    """4 prompt and 6 new tokens: [0 4) is the prompt's, [4 8) was generated, and 9 positions are in the cache."""
    for deterministic, known in ((True, 8), (False, 4)):
        scheduler = scheduler_of(num_pages=20)
        scheduler.feed(iter([request_of("a", [1, 2, 3, 4, 5], 7, deterministic=deterministic)]))
        (sample,) = scheduler.admit(CONTEXT).samples
        sample.tokens += [6, 7, 8, 9, 10]
        sample.committed, sample.length = 10, 9
        scheduler.remove(sample, CONTEXT, keep=True)
        scheduler.feed(iter([request_of("b", list(range(1, 13)))]))
        assert scheduler.admit(CONTEXT).samples[0].length == known


def test_pages_are_forgotten_least_recently_used_first_and_ends_before_beginnings():
    pool = PagePool(4)
    old, new = ([pool.allocate(), pool.allocate()] for _ in range(2))
    keys = prefix_keys(CONTEXT, range(8), PAGE) + prefix_keys(b"other", range(8), PAGE)
    for key, page in zip(keys, old + new, strict=True):
        pool.register(key, page)
    pool.release(old)
    pool.release(new)
    assert pool.share(keys[0]) == old[0]  # used again
    pool.release([old[0]])
    for gone in (1, 3, 2, 0):
        assert pool.find(keys[gone]) is not None
        pool.allocate()
        assert pool.find(keys[gone]) is None
    with pytest.raises(IndexError, match="all 4 pages are held"):
        pool.allocate()


def test_keys_depend_on_context_and_on_every_token_before():
    keys = prefix_keys(CONTEXT, [1, 2, 3, 4, 5, 6, 7, 8, 9], PAGE)
    assert len(keys) == 2
    assert prefix_keys(CONTEXT, [1, 2, 3, 4, 5, 6, 7, 8], PAGE) == keys
    assert prefix_keys(CONTEXT, [1, 2, 3, 0, 5, 6, 7, 8], PAGE)[1] != keys[1]
    assert prefix_keys(b"other", [1, 2, 3, 4], PAGE) != keys[:1]
    assert partial_key(keys[0], [5, 6]) != partial_key(keys[0], [5, 6, 7]) != partial_key(keys[1], [5, 6, 7])


def test_preempted_sample_goes_first_and_finds_its_pages():
    scheduler = scheduler_of(num_pages=6)
    scheduler.feed(iter([request_of("a", [1] * 7, 8), request_of("b", [2] * 6, 8), request_of("c", [3])]))
    a, b, *_ = scheduler.admit(CONTEXT).samples
    run_prefill(scheduler)
    b.tokens += [9, 9, 9]
    b.committed, b.length = 9, 8
    while scheduler.samples[-1] is not b:
        scheduler.remove(scheduler.samples[-1], CONTEXT, keep=False)
    assert scheduler.affordable(8, 1) < 8
    scheduler.preempt(CONTEXT)
    assert scheduler.samples == [a]
    assert scheduler.num_preemptions == 1
    scheduler.remove(a, CONTEXT, keep=False)
    again = scheduler.admit(CONTEXT).samples[0]
    assert again is b
    assert again.length == 8
    assert again.tokens[-3:] == [9, 9, 9]
