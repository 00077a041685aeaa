"""Rows and pages after any sequence of admissions, growth, preemptions, ends and aborts: none leaked, none owned twice."""

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from detspec.cache import SCRATCH_PAGE
from detspec.engine.decide import Segment
from detspec.engine.request import Request
from detspec.engine.scheduler import PagePool, Scheduler, partial_key, prefix_keys
from detspec.engine.segments import apart
from detspec.engine.sequence import SequenceState
from detspec.generation.loop import NEVER
from detspec.riders.riding import NOTHING_BROUGHT, Brought
from detspec.sampling_params import SamplingParams

PAGE, MAX_PAGES, MAX_REQUESTS, WINDOW = 4, 6, 4, 2
CONTEXT = b"weights"


def scheduler_of(num_pages: int, *, sharing: bool = True) -> Scheduler:
    pool = PagePool(num_pages, CONTEXT)
    shape = MAX_REQUESTS, MAX_PAGES
    return Scheduler(pool, deque(), page=PAGE, shape=shape, sharing=sharing, window=WINDOW)


def request_of(id: str, prompt: list[int], max_tokens: int = 4, **sampling) -> Request:
    return Request(id, tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling))


def queue(scheduler: Scheduler, *requests: Request) -> None:
    """A rider reads the prompts of those that think."""
    for request in requests:
        said = Brought({}, None, is_read=True) if request.sampling.thinking else NOTHING_BROUGHT
        scheduler.queue.extend(SequenceState(sample, brought=said) for sample in request.samples())


def steps_of(number: int) -> Segment:
    """A segment of so many steps."""
    return Segment(rounds=0, prefill_passes=0, steps=number, max_idle=NEVER, min_live=1)


def admitted_of(scheduler: Scheduler) -> list[SequenceState]:
    return [sequence for sequence, _ in scheduler.admit()]


class Life(RuleBasedStateMachine):
    """Random lives of requests over few tokens, so that many prompts begin alike; `step` plays the device."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler_of(num_pages=9)
        self.written: dict[int, list[tuple[int, ...] | None]] = {}  # page -> for each slot, all tokens up to it
        self.number = 0

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

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
            asked = {"n": n, "deterministic": deterministic, "thinking": thinking}
            queue(self.scheduler, request_of(str(self.number), prompt, max_tokens, **asked))

    @rule()
    def admit(self):
        for sequence, (source, target) in self.scheduler.admit():
            if source != SCRATCH_PAGE:
                self.written[target] = list(self.written[source])
            assert not (sequence.brought.is_read and sequence.length), "a prompt that is thought about is read from its start"
            for position in range(sequence.length):  # what it takes for known is there
                assert self.slots(sequence, position)[position % PAGE] == tuple(sequence.tokens[: position + 1])

    @precondition(lambda self: self.scheduler.sequences)
    @rule(gain=st.integers(1, 6), data=st.data())
    def step(self, gain, data):
        """Pages for `gain` tokens, or the youngest goes; then every row catches up or gains tokens, all of them 7."""
        while (reserved := self.scheduler.reserve(steps_of(gain), 1)) is None:
            assert len(self.scheduler.sequences) > 1, "the oldest is never preempted"
            self.scheduler.preempt()
        gain = reserved.num_steps
        for sequence in self.scheduler.sequences:
            if sequence.behind:
                reached = min(sequence.length + data.draw(st.integers(1, 8)), sequence.committed - 1)
            else:
                for _ in range(data.draw(st.integers(1, gain))):
                    if sequence.committed < sequence.limit:
                        sequence.tokens.append(7)
                        sequence.committed += 1
                reached = sequence.committed - 1
            for position in range(sequence.length, reached):
                slots = self.slots(sequence, position)
                assert self.pool._holders[sequence.pages[position // PAGE]] == 1, "pages that others hold are never written"
                # Of a prompt that is read thinking, keys and values are not those of its tokens.
                written = tuple(sequence.tokens[: position + 1])
                slots[position % PAGE] = ("thinking", *written) if sequence.brought.is_read else written
            sequence.length = reached
            self.scheduler.register(sequence)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        self.scheduler.remove(data.draw(st.sampled_from(self.scheduler.sequences)), keep=keep)

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def abort(self, data):
        id = str(data.draw(st.integers(1, self.number)))
        gone = [sequence for sequence in self.scheduler.all if sequence.request.id == id]
        self.scheduler.take_out(lambda sequence: sequence.request.id == id)
        assert all(sequence.place is None and not sequence.pages for sequence in gone)
        assert not any(sequence.request.id == id for sequence in self.scheduler.all)

    @rule()
    def other_weights(self):
        for sequence in list(self.scheduler.sequences):
            self.scheduler.remove(sequence, keep=True)
        self.pool.clear()
        assert self.pool.num_available == self.pool.num_pages

    @invariant()
    def every_page_is_in_one_place(self):
        free, kept, held = list(self.pool._free), list(self.pool._kept), list(self.pool._holders)
        assert sorted(free + kept + held) == list(range(1, self.pool.num_pages + 1))
        listed = Counter(page for sequence in self.scheduler.sequences for page in sequence.pages)
        assert listed == Counter(self.pool._holders)

    @invariant()
    def page_table_lists_the_pages_of_the_rows(self):
        table = self.scheduler.page_table
        rows = {sequence.place: sequence.pages for sequence in self.scheduler.sequences}
        assert len(rows) == len(self.scheduler.sequences)
        for place in range(MAX_REQUESTS):
            pages = rows.get(place, [])
            assert table[place].tolist() == pages + [SCRATCH_PAGE] * (MAX_PAGES - len(pages))

    @invariant()
    def no_sequence_waits_for_a_page_that_is_not_being_filled(self):
        assert all(sequence in self.scheduler.sequences for sequence in self.scheduler._filling.values())

    def slots(self, sequence: SequenceState, position: int) -> list[tuple[int, ...] | None]:
        return self.written.setdefault(sequence.pages[position // PAGE], [None] * PAGE)

    def teardown(self):
        self.scheduler.take_out(lambda sequence: True)
        assert self.pool.num_held == 0
        assert self.pool.num_available == self.pool.num_pages


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_any_life_of_requests_leaks_no_page_and_shares_only_what_is_written = Life.TestCase


def run_prefill(scheduler: Scheduler) -> None:
    """All rows catch up."""
    for sequence in scheduler.sequences:
        sequence.length = sequence.committed - 1
        scheduler.register(sequence)


def test_samples_of_one_prompt_wait_for_the_first_and_then_share_all_of_it():
    """10 prompt tokens: pages [0 4) [4 8) are shared, the 9th token's page is copied; the 10th token is the first input."""
    scheduler = scheduler_of(num_pages=20)
    queue(scheduler, request_of("a", list(range(10)), n=3), request_of("b", [5]))
    first = admitted_of(scheduler)
    assert [(s.request.id, s.request.index) for s in first] == [("a", 0), ("b", 0)]  # b passes those who wait
    assert scheduler.admit() == []
    run_prefill(scheduler)
    admitted = scheduler.admit()
    assert [(s.request.id, s.request.index) for s, _ in admitted] == [("a", 1), ("a", 2)]
    leader = first[0]
    for sequence, copy in admitted:
        assert sequence.pages[:2] == leader.pages[:2]
        assert copy == (leader.pages[2], sequence.pages[2])
        assert sequence.pages[2] != leader.pages[2]
        assert sequence.length == 9


def test_without_sharing_no_sequence_waits_and_nothing_is_shared():
    scheduler = scheduler_of(num_pages=20, sharing=False)
    queue(scheduler, request_of("a", list(range(10)), n=3))
    sequences = admitted_of(scheduler)
    assert len({page for sequence in sequences for page in sequence.pages}) == sum(
        len(sequence.pages) for sequence in sequences
    )
    assert [sequence.length for sequence in sequences] == [0, 0, 0]


def test_whole_pages_of_canonical_tokens_are_found_again_and_ordinary_ones_are_not():
    """4 prompt and 6 new tokens: [0 4) is the prompt's, [4 8) was generated, and 9 positions are in the cache."""
    for deterministic, known in ((True, 8), (False, 4)):
        scheduler = scheduler_of(num_pages=20)
        queue(scheduler, request_of("a", [1, 2, 3, 4, 5], 7, deterministic=deterministic))
        (sequence,) = admitted_of(scheduler)
        sequence.tokens += [6, 7, 8, 9, 10]
        sequence.committed, sequence.length = 10, 9
        scheduler.remove(sequence, keep=True)
        queue(scheduler, request_of("b", list(range(1, 13))))
        assert admitted_of(scheduler)[0].length == known


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


def test_a_page_is_left_for_each_sequence_that_may_grow_and_for_no_other():
    """Each prompt of 4 tokens gets pages for 2 more at once, of two pages in all or of three."""
    for max_tokens, num_admitted in ((4, 4), (8, 3)):
        scheduler = scheduler_of(num_pages=8, sharing=False)
        queue(scheduler, *(request_of(str(i), [i] * 4, max_tokens=max_tokens) for i in range(4)))
        assert len(admitted_of(scheduler)) == num_admitted


def test_keys_depend_on_context_and_on_every_token_before():
    keys = prefix_keys(CONTEXT, [1, 2, 3, 4, 5, 6, 7, 8, 9], PAGE)
    assert len(keys) == 2
    assert prefix_keys(CONTEXT, [1, 2, 3, 4, 5, 6, 7, 8], PAGE) == keys
    assert prefix_keys(CONTEXT, [1, 2, 3, 0, 5, 6, 7, 8], PAGE)[1] != keys[1]
    assert prefix_keys(b"other", [1, 2, 3, 4], PAGE) != keys[:1]
    assert partial_key(keys[0], [5, 6]) != partial_key(keys[0], [5, 6, 7]) != partial_key(keys[1], [5, 6, 7])


def test_preempted_sample_goes_first_and_finds_its_pages():
    scheduler = scheduler_of(num_pages=6)
    queue(scheduler, request_of("a", [1] * 7, 8), request_of("b", [2] * 6, 8), request_of("c", [3]))
    a, b, *_ = admitted_of(scheduler)
    run_prefill(scheduler)
    b.tokens += [9, 9, 9]
    b.committed, b.length = 9, 8
    while scheduler.sequences[-1] is not b:
        scheduler.remove(scheduler.sequences[-1], keep=False)
    assert scheduler.reserve(steps_of(8), 1).num_steps < 8
    scheduler.preempt()
    assert scheduler.sequences == [a]
    assert scheduler.num_preemptions == 1
    scheduler.remove(a, keep=False)
    again = admitted_of(scheduler)[0]
    assert again is b
    assert again.length == 8
    assert again.tokens[-3:] == [9, 9, 9]


def test_copies_that_meet_are_programs_of_their_own():
    """A page that is copied on, one that is written over after it was copied, and one that both read."""
    assert apart([]) == []
    assert apart([(1, 2), (2, 3)]) == [[(1, 2)], [(2, 3)]]
    assert apart([(1, 2), (3, 1)]) == [[(1, 2)], [(3, 1)]]
    assert apart([(1, 2), (1, 3), (4, 5)]) == [[(1, 2), (1, 3), (4, 5)]]
    assert apart([(1, 2), (2, 3), (3, 4), (5, 2)]) == [[(1, 2)], [(2, 3)], [(3, 4), (5, 2)]]
