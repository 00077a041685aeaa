"""The step of the engine, on a device that counts up: requests come, stream, are aborted and go at any moment."""

import dataclasses
import itertools
import random

import pytest

from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.engine.fake_device import FakeDevice

SCHEDULE = Schedule(Numerics(page=4), Budget(16, 4))
VOCAB = 97


def make(max_requests: int = 4, **changes) -> Engine:
    num_pages = changes.pop("num_pages", None)
    num_replicas = changes.pop("num_replicas", 1)
    config = EngineConfig(max_requests=max_requests, max_len=64, method="none", segment_steps=8, **changes)
    return Engine.over([FakeDevice(SCHEDULE, config, num_pages=num_pages) for _ in range(num_replicas)])


def request_of(id: str, start: int = 5, length: int = 6, max_tokens: int = 10, **sampling) -> Request:
    prompt = tuple((start + i) % VOCAB for i in range(length))
    return Request(id, prompt, SamplingParams(max_tokens=max_tokens, **sampling))


def counted(request: Request) -> tuple[int, ...]:
    last = request.prompt_token_ids[-1]
    return tuple((last + 1 + i) % VOCAB for i in range(request.sampling.max_tokens))


def finish(engine: Engine) -> dict[str, list]:
    """Steps until nothing is left; updates by request."""
    updates: dict[str, list] = {}
    while engine.has_work:
        for update in engine.step():
            updates.setdefault(update.request.id, []).append(update)
    return updates


def tokens_of(updates: list) -> tuple[int, ...]:
    return sum((update.token_ids for update in updates), ())


def test_step_of_an_idle_engine_does_nothing():
    engine = make()
    assert not engine.has_work
    assert engine.step() == []


def test_requests_that_come_while_others_run_are_all_completed():
    engine = make(max_requests=3)
    requests = [request_of(str(i), start=i, max_tokens=3 + i) for i in range(9)]
    updates: list = []
    for request in requests:
        engine.add(request)
        updates += engine.step()
    while engine.has_work:
        updates += engine.step()
    assert {u.request.id: u.completion.token_ids for u in updates if u.completion} == {r.id: counted(r) for r in requests}
    assert engine.num_pages_held == 0
    assert engine.num_tokens == sum(r.sampling.max_tokens for r in requests)


def test_update_of_a_request_that_is_not_streamed_comes_once_and_of_a_streamed_one_with_every_step():
    engine = make()
    engine.add(request_of("whole"))
    engine.add(request_of("piecewise", start=30), stream=True)
    updates = finish(engine)
    assert len(updates["whole"]) == 1
    assert len(updates["piecewise"]) == 10
    for id in ("whole", "piecewise"):
        assert tokens_of(updates[id]) == updates[id][-1].completion.token_ids
        assert [update.completion is None for update in updates[id]] == [True] * (len(updates[id]) - 1) + [False]


def test_streams_runs_and_added_requests_go_on_side_by_side():
    """Each driver gets its own updates, also those of steps that another driver took."""
    engine = make(max_requests=2)
    prompts = [request_of(str(i), start=7 * i, max_tokens=8) for i in range(3)]
    streams = [engine.stream(list(r.prompt_token_ids), r.sampling) for r in prompts]
    engine.add(request_of("added", start=50))
    found = [() for _ in streams]
    for i in itertools.cycle(range(3)):
        piece = next(streams[i], None)
        if piece is None:
            break
        found[i] += piece.token_ids
    (whole,) = engine.generate([list(prompts[0].prompt_token_ids)], prompts[0].sampling)
    for i, stream in enumerate(streams):
        found[i] += tokens_of(list(stream))
    assert found == [counted(r) for r in prompts]
    assert whole.token_ids == counted(prompts[0])
    assert tokens_of(finish(engine)["added"]) == counted(request_of("added", start=50))


def test_source_with_nothing_to_give_at_the_moment_holds_up_neither_its_own_requests_nor_others():
    engine = make(max_requests=2)
    engine.add(request_of("added", start=50))
    given = [request_of("a"), None, None, None, request_of("b", start=20), None]
    seen = []
    for completion in engine.run(iter(given)):
        seen.append(completion.id)
    assert seen == ["a", "b"]
    assert [u.request.id for u in engine.step()] == ["added"]


def test_samples_of_one_request_are_updated_under_their_indices():
    engine = make()
    engine.add(request_of("a", n=3, seed=4))
    updates = finish(engine)["a"]
    assert sorted((u.request.index, u.request.sampling.seed) for u in updates) == [(0, 4), (1, 5), (2, 6)]


def test_abort_ends_a_request_in_a_place_one_in_the_queue_and_one_that_was_just_added():
    engine = make(max_requests=1)
    for i, id in enumerate(("running", "queued")):
        engine.add(request_of(id, start=20 * i, max_tokens=40))
    engine.step()
    engine.step()
    engine.add(request_of("late"))
    for id in ("running", "queued", "late", "unknown"):
        engine.abort(id)
    updates = finish(engine)
    assert {id: u[-1].completion.finish_reason for id, u in updates.items()} == dict.fromkeys(updates, "abort")
    assert set(updates) == {"running", "queued", "late"}
    assert 0 < len(updates["running"][0].token_ids) < 40
    assert (
        updates["running"][0].token_ids
        == counted(request_of("running", max_tokens=40, start=0))[: len(tokens_of(updates["running"]))]
    )
    assert updates["queued"][0].token_ids == ()
    assert engine.num_pages_held == 0


def test_driver_that_is_left_gives_everything_back_and_leaves_the_others_alone():
    engine = make(max_requests=2)
    left, kept = (engine.stream([start, start + 1], SamplingParams(max_tokens=20)) for start in (3, 40))
    first = next(left).token_ids
    begun = next(kept).token_ids
    left.close()
    assert first == (5,)
    assert begun + tokens_of(list(kept)) == counted(request_of("kept", start=40, length=2, max_tokens=20))
    assert engine.num_pages_held == 0
    assert not engine.has_work


def test_stop_returns_what_the_segment_on_the_device_brought_and_drops_the_rest():
    engine = make(max_requests=2)
    engine.add(request_of("short", max_tokens=3))
    engine.add(request_of("long", max_tokens=50))
    engine.add(request_of("waiting"))
    engine.step()
    updates = engine.stop()
    assert [(u.request.id, u.completion.finish_reason) for u in updates] == [("short", "length")]
    assert not engine.has_work
    assert engine.num_pages_held == 0


def test_request_that_does_not_fit_is_refused_by_add_and_nothing_else_is_lost():
    engine = make()
    engine.add(request_of("good"))
    with pytest.raises(InputError, match="together more than the cache's max_len of 64"):
        engine.add(request_of("bad", max_tokens=90))
    assert set(finish(engine)) == {"good"}


def test_weights_change_only_while_nothing_is_in_flight():
    engine = make()
    engine.add(request_of("a"))
    with pytest.raises(InputError, match="requests are in flight"):
        engine.update_params({})


def test_traffic_that_grows_meets_programs_for_all_of_it_and_keeps_its_bits():
    """A request alone takes a program of one sequence; when more come, it is preempted once and goes on."""
    engine = make(max_requests=4)
    engine.add(request_of("first", max_tokens=40))
    updates = [*engine.step(), *engine.step()]
    assert {plan.batch for plan in engine.certificates} == {1}
    for i in range(3):
        engine.add(request_of(str(i), start=10 * i))
    while engine.has_work:
        updates += engine.step()
    assert {plan.batch for plan in engine.certificates} == {1, 4}
    assert engine.num_preemptions == 1
    assert tokens_of([u for u in updates if u.request.id == "first"]) == counted(request_of("first", max_tokens=40))


@pytest.mark.parametrize(("seed", "num_replicas"), [*((seed, 1) for seed in range(6)), (6, 2), (7, 3)])
def test_any_traffic_leaks_no_page_and_counts_right(seed: int, num_replicas: int):
    """Few pages, so that sequences are preempted; prompts that begin alike, so that pages are shared and copied."""
    rng = random.Random(seed)
    engine = make(max_requests=4, num_pages=19, num_replicas=num_replicas)
    engine.prepare()
    asked: dict[str, Request] = {}
    updates: dict[tuple[str, int], list] = {}
    gone: set[str] = set()
    while len(asked) < 60 or engine.has_work:
        for _ in range(rng.randrange(4) if len(asked) < 60 else 0):
            id = str(len(asked))
            asked[id] = request_of(
                id,
                start=rng.choice((1, 1, 9)),
                length=rng.randrange(1, 30),
                max_tokens=rng.randrange(1, 30),
                n=rng.choice((1, 1, 2)),
                deterministic=rng.random() < 0.7,
                stop_token_ids=(40,) if rng.random() < 0.3 else (),
            )
            if asked[id].sampling.n == 1 and rng.random() < 0.2:
                asked[id] = dataclasses.replace(asked[id], given_token_ids=counted(asked[id]))
            engine.add(asked[id], stream=rng.random() < 0.2)
        if asked and rng.random() < 0.1:
            gone.add(id := rng.choice(list(asked)))
            engine.abort(id)
        for update in engine.step():
            updates.setdefault((update.request.id, update.request.index), []).append(update)
    for (id, _), brought in updates.items():
        found, expected = tokens_of(brought), counted(asked[id])
        if asked[id].given_token_ids:
            assert brought[-1].completion.finish_reason in ("given", "abort")
        elif 40 in asked[id].sampling.stop_token_ids and 40 in expected:
            expected = expected[: expected.index(40) + 1]
        assert found == (expected[: len(found)] if brought[-1].completion.finish_reason == "abort" else expected)
        assert brought[-1].completion.finish_reason != "abort" or id in gone
    assert sorted(updates) == sorted((id, i) for id, request in asked.items() for i in range(request.sampling.n))
    assert engine.num_pages_held == 0
    assert engine.num_preemptions > 0


def test_replicas_share_one_queue_evenly_and_all_work():
    engine = make(max_requests=4, num_replicas=3)
    requests = [request_of(str(i), start=7 * i, max_tokens=20) for i in range(8)]
    for request in requests:
        engine.add(request)
    updates = engine.step()
    assert [len(replica.sequences) for replica in engine.replicas] == [3, 3, 2]
    while engine.has_work:
        updates += engine.step()
    assert {u.request.id: u.completion.token_ids for u in updates} == {r.id: counted(r) for r in requests}
    assert [replica.num_tokens for replica in engine.replicas] == [60, 60, 40]


def test_sequence_goes_to_the_replica_that_holds_most_of_its_prompt_unless_that_is_full():
    engine = make(max_requests=2, num_replicas=2)
    engine.prepare()  # else pages are forgotten when traffic grows
    first, other = request_of("first", start=1, length=20), request_of("other", start=60, length=20)
    list(engine.run([first, other]))
    for id, request in (("a", other), ("b", first), ("c", other), ("d", other)):
        engine.add(request_of(id, start=request.prompt_token_ids[0], length=20, max_tokens=40))
    for _ in range(3):  # "c" waits until "a" has filled the last page
        engine.step()
    found = [{sequence.request.id for sequence in replica.sequences} for replica in engine.replicas]
    assert found == [{"b", "d"}, {"a", "c"}]


def test_abort_reaches_the_replica_of_a_request_and_stopping_drops_all():
    engine = make(max_requests=2, num_replicas=2)
    for number in range(6):
        engine.add(request_of(str(number), start=9 * number, max_tokens=40))
    engine.step()
    for id in ("1", "2", "5"):
        engine.abort(id)
    ended = [update.completion for _ in range(2) for update in engine.step() if update.completion is not None]
    assert sorted((one.id, one.finish_reason) for one in ended) == [("1", "abort"), ("2", "abort"), ("5", "abort")]
    engine.stop()
    assert not engine.has_work
    assert engine.num_pages_held == 0


def test_fault_at_one_request_leaves_those_of_other_replicas_alone(monkeypatch):
    engine = make(max_requests=2, num_replicas=2)
    requests = [request_of(str(number), start=9 * number) for number in range(4)]
    put = engine.replicas[1].device.put

    def fails(entries):
        if any(entry.tokens[0] == 18 for entry in entries):
            raise ValueError("unsound")
        put(entries)

    monkeypatch.setattr(engine.replicas[1].device, "put", fails)
    found = {completion.id: completion for completion in engine.run(requests)}
    assert found.pop("2").error == "ValueError: unsound"
    assert {id: completion.token_ids for id, completion in found.items()} == {
        request.id: counted(request) for request in requests if request.id != "2"
    }


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_replays_come_in_order_wherever_they_are_read_and_keep_nothing(num_replicas):
    engine = make(max_requests=3, num_replicas=num_replicas)
    requests = [request_of(str(i), start=5 * (i % 3), length=1 + 3 * i, max_tokens=9) for i in range(11)]
    records = [(request, counted(request)[: i % 9]) for i, request in enumerate(requests)]
    replays = list(engine.replay(iter(records)))
    assert [tuple(replay.targets.tolist()) for replay in replays] == [counted(r)[: i % 9 + 1] for i, r in enumerate(requests)]
    assert [len(replay.given_logprobs) for replay in replays] == [i % 9 for i in range(11)]
    assert not engine.certificates
    assert not engine.has_work
    assert engine.num_pages_held == 0


def test_text_that_is_read_is_waited_for_a_step_later_and_may_be_aborted_or_dropped_until_then():
    engine = make(max_requests=2)
    for start, id in enumerate(("kept", "aborted")):
        engine.add(dataclasses.replace(request_of(id, start=start), given_token_ids=(1, 2, 3)))
    assert engine.step() == []
    assert engine.num_live == 2
    engine.abort("aborted")
    found = {update.request.id: update.completion for update in engine.step()}
    assert {id: (one.finish_reason, one.token_ids) for id, one in found.items()} == {
        "kept": ("given", (1, 2, 3)),
        "aborted": ("abort", ()),
    }
    engine.add(dataclasses.replace(request_of("dropped"), given_token_ids=(1, 2, 3)))
    engine.step()
    assert [update.request.id for update in engine.stop()] == ["dropped"]
    assert not engine.has_work


def test_ordinary_log_probabilities_follow_the_batch_and_deterministic_ones_do_not():
    """The inverse control of every comparison of bits on this device."""
    engine = make(max_requests=4)
    for deterministic in (True, False):
        sampling = SamplingParams(max_tokens=5, deterministic=deterministic)
        alone = engine.generate([[3, 4]], sampling)[0]
        crowd = engine.generate([[3, 4], [8], [9], [10]], sampling)[0]
        assert (alone.logprobs == crowd.logprobs) == deterministic
        assert alone.token_ids == crowd.token_ids
