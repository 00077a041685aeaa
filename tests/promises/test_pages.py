"""Bits of a request do not depend on shared prefixes, preemption, or neighbours that are aborted.

The controls take one safeguard away each. Without verification, a request gets other bits in such company. With keys that do
not name the tokens, pages are shared that hold another text. A preempted request that is not caught up with reads empty pages.
Pages that are copied from each other in one program do not hold what they should.
"""

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.request import Completion
from detspec.riders.counters import Stats
from detspec.riders.rider import Entry
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import facts, make_engine, ordinary
from tests.engine.mixed_requests import SHUFFLED, mixed_requests, run
from tests.engine.scored import bits, texts_of
from tests.fakes import random_model
from tests.mesh.shapes import KINDS, engine_on, job, requests
from tests.mesh.shapes import facts as completion_facts


@contextlib.contextmanager
def few_pages(engine: Engine, number: int) -> Iterator[Engine]:
    """The engine with so many of its pages; the others are taken."""
    pool = engine.replicas[0].pool
    taken = [pool.allocate() for _ in range(engine.num_pages - number)]
    yield engine
    pool.release(taken)


def test_order_and_rows_change_nothing(mixed_alone, three_rows, eight_rows):
    assert run(eight_rows) == mixed_alone
    assert run(eight_rows, SHUFFLED) == mixed_alone
    assert run(three_rows, SHUFFLED[::-1]) == mixed_alone


def test_without_prefix_sharing_nothing_changes(mixed_alone, model):
    assert run(make_engine(model, 3, "self", prefix_sharing=False), SHUFFLED) == mixed_alone


def test_too_few_pages_preempt_and_change_nothing(mixed_alone, eight_rows):
    """Eight rows of up to four pages each, and pages for two of them."""
    before = eight_rows.num_preemptions
    with few_pages(eight_rows, 8):
        assert run(eight_rows, held=24) == mixed_alone
        assert run(eight_rows, SHUFFLED, held=24) == mixed_alone
    assert eight_rows.num_preemptions > before


@pytest.mark.optimised
@pytest.mark.sweep
@pytest.mark.parametrize("name", KINDS)
def test_requests_to_every_kind_of_layer_have_the_bits_of_one_alone_in_few_pages(name):
    """Alone without shared pages; then in reverse, three at once with drafts, preempted by each other."""
    model = Model(KINDS[name], random_model(KINDS[name]), None, (), "")
    prompts, sampling = requests(model.cfg.vocab_size)
    few = engine_on(model, num_pages=9, max_requests=3, method="self")
    together = [completion_facts(completion) for completion in few.generate(prompts[::-1], sampling[::-1])][::-1]
    assert together == job(model, max_requests=1, prefix_sharing=False)
    assert few.num_preemptions > 0


def test_abort_gives_pages_back_and_leaves_the_others_their_bits(mixed_alone, model):
    engine = make_engine(model, 3, "self", segment_steps=4)  # the host looks often enough to abort it in the middle
    requests = mixed_requests()
    engine.add(engine.request([3], SamplingParams(max_tokens=60, ignore_eos=True), id="endless"))
    for i, (prompt, sampling) in enumerate(requests):
        engine.add(engine.request(prompt, sampling, id=str(i)))
    completions = []
    while engine.has_work:
        completions += [update.completion for update in engine.step() if update.completion]
        if len(completions) == 1:
            engine.abort("endless")
    aborted = [c for c in completions if c.finish_reason == "abort"]
    assert [c.id for c in aborted] == ["endless"]
    assert aborted[0].stats.num_verify_passes > 0
    assert engine.stats == sum((c.stats for c in completions), Stats())
    (whole,) = engine.generate([[3]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert 0 < len(aborted[0].token_ids) < 60
    assert aborted[0].token_ids == whole.token_ids[: len(aborted[0].token_ids)]
    others = sorted((c for c in completions if c.id != "endless"), key=lambda c: (int(c.id), c.index))
    assert [(c.id, c.index, *facts(c), c.digest) for c in others] == mixed_alone


def scores_of_equal_texts(engine: Engine, written: Sequence[Completion]) -> list[set[str]]:
    """Different scores of eight equal texts, one text after the other; requests between them leave no page free."""
    found = []
    for completion in written:
        run(engine, SHUFFLED)
        texts, starts = texts_of([completion])
        found.append(set(map(str, bits(engine.score(texts * 8, starts * 8)))))
    return found


def test_equal_texts_copy_their_last_page_from_each_other(written, model):
    alone = [{str(each)} for each in bits(written)]
    assert scores_of_equal_texts(make_engine(model, 8, "none"), written) == alone


def test_control_pages_copied_from_each_other_in_one_program_give_other_bits(written, model, monkeypatch):
    monkeypatch.setattr("detspec.engine.segments.apart", lambda copies: [copies] if copies else [])
    engine = make_engine(model, 8, "none")  # threads race: rarely, no round of copies comes out of order
    assert any(len(scores) > 1 for _ in range(20) for scores in scores_of_equal_texts(engine, written))


def test_control_ordinary_requests_in_such_company_get_other_bits(one_row, three_rows, eight_rows):
    alone = run(one_row, change=ordinary)
    with few_pages(eight_rows, 8):
        preempted = run(eight_rows, change=ordinary, held=24)
    assert any(found != alone for found in (preempted, run(three_rows, change=ordinary)))


def test_control_pages_under_keys_without_tokens_give_other_bits(mixed_alone, model, monkeypatch):
    def numbered(root: bytes, tokens: Sequence[int], page: int) -> list[bytes]:
        return [root + bytes([number]) for number in range(len(tokens) // page)]

    monkeypatch.setattr("detspec.engine.scheduler.prefix_keys", numbered)
    assert run(make_engine(model, 3, "self")) != mixed_alone


def test_control_preempted_requests_that_are_not_caught_up_with_get_other_bits(mixed_alone, model):
    engine = make_engine(model, 3, "self")
    put = engine.device.put

    def as_if_read(entry: Entry) -> Entry:
        is_resumed = len(entry.tokens) > len(entry.prompt)
        return entry._replace(length=len(entry.tokens) - 1) if is_resumed else entry

    with few_pages(engine, 4):
        assert run(engine, held=8) == mixed_alone
        assert engine.num_preemptions > 0
        engine.device.put = lambda entries: put([as_if_read(entry) for entry in entries])
        assert run(engine, held=8) != mixed_alone
