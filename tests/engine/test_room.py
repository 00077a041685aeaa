"""Room for biased tokens and stop tokens grows with what is asked, and moves no bit of any request."""

import dataclasses

import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Room
from detspec.engine.request import Request
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import (
    SCHEDULE,
    byte_params,
    facts,
    make_engine,
    ordinary,
    some_prompts,
    some_sampling,
    without_tokenizer,
)
from tests.engine.fake_device import FakeDevice

pytestmark = pytest.mark.optimised

ROOMS = (Room(4, 8), Room(64, 512))
PROMPTS = some_prompts(3)
FEW = {"max_tokens": 8, "logit_bias": {7: 4.0, 300: 3.5, 900: -9.0}, "stop_token_ids": (11, 12), "min_tokens": 4}
BIASES = {token: (3.0, -2.0, 0.5)[token % 3] for token in range(0, 2000, 5)}  # 400 tokens
STOPS = tuple(range(3, 2000, 50))  # 40
WIDE = SamplingParams(max_tokens=9, temperature=0.8, seed=5, logit_bias=BIASES, stop_token_ids=STOPS, min_tokens=9)


@pytest.fixture(scope="module")
def model():
    return without_tokenizer(byte_params())


@pytest.fixture(scope="module")
def engines(model) -> list[Engine]:
    """Engines of one shape with each of the rooms from the start."""
    return [
        make_engine(model, 3, "none", segment_steps=2, max_stop_ids=room.stop_ids, max_logit_bias=room.logit_bias)
        for room in ROOMS
    ]


def narrow() -> list[SamplingParams]:
    """Greedy and sampled requests, the last one ordinary, that fit into any of the rooms."""
    first, second, third = (dataclasses.replace(sampling, **FEW) for sampling in some_sampling(3))
    return [first, second, ordinary(third)]


@pytest.mark.slow
def test_room_that_is_not_used_moves_no_bit(engines):
    found = [[facts(c) for c in engine.generate(PROMPTS, narrow())] for engine in engines]
    assert found[0] == found[1]
    assert [engine.device.room for engine in engines] == list(ROOMS)
    for change in ({"logit_bias": {}}, {"min_tokens": 0, "stop_token_ids": found[0][0][0][:1]}):
        others = engines[1].generate(PROMPTS, [dataclasses.replace(sampling, **change) for sampling in narrow()])
        assert [facts(c) for c in others] != found[1]


def test_room_grows_between_two_steps_and_moves_no_bit(engines):
    """Wide requests come when others have begun, which go on to the bits that they have alone."""
    engine, widest = engines
    alone = [facts(c) for c in engine.generate(PROMPTS[:2], narrow()[:2])]
    wide_alone = facts(widest.generate([PROMPTS[2]], WIDE)[0])
    for number in range(2):
        engine.add(engine.request(PROMPTS[number], narrow()[number], id=str(number)), stream=True)
    pieces = [update for _ in range(3) for update in engine.step()]
    assert pieces
    assert not any(update.completion for update in pieces)
    engine.add(engine.request(PROMPTS[2], WIDE, id="wide"))
    engine.add(engine.request(PROMPTS[2], ordinary(WIDE), id="ordinary"))
    while engine.has_work:
        pieces += engine.step()
    assert engine.device.room == ROOMS[-1]
    ended = {update.request.id: update.completion for update in pieces if update.completion}
    assert [facts(ended[id]) for id in ("0", "1", "wide")] == [*alone, wide_alone]
    assert len(ended["ordinary"].token_ids) == WIDE.max_tokens
    without = widest.generate([PROMPTS[2]], dataclasses.replace(WIDE, logit_bias={}))
    assert facts(without[0]) != wide_alone


@pytest.mark.slow
def test_replay_of_a_request_with_many_biased_tokens_has_its_bits(model, engines, monkeypatch):
    monkeypatch.setattr("detspec.engine.replica.certified_passes", lambda device: device.schedule)  # one program
    [completion] = engines[-1].generate([PROMPTS[2]], WIDE)
    tokens = completion.token_ids
    replaying = make_engine(model, 3, "none")
    each = (dataclasses.replace(WIDE, logit_bias={}), WIDE, WIDE)
    unbiased, *replays = replaying.replay([(Request(str(i), tuple(PROMPTS[2]), one), tokens) for i, one in enumerate(each)])
    for replay in replays:
        assert tuple(replay.targets[: len(tokens)].tolist()) == tokens
        assert replay.logprobs[: len(tokens)].tobytes() == np.asarray(completion.logprobs, np.float32).tobytes()
    assert tuple(unbiased.targets[: len(tokens)].tolist()) != tokens


# The host alone ------------------------------------------------------------------------------------------------------------


def fake_engine() -> Engine:
    return Engine.over(FakeDevice(SCHEDULE, EngineConfig(max_requests=4, max_len=64)))


def test_room_is_a_power_of_two_and_never_shrinks():
    room = Room(16, 64)
    assert room.with_room_for(SamplingParams(stop_token_ids=range(15), logit_bias=dict.fromkeys(range(64), 1)), [20]) == room
    assert room.with_room_for(SamplingParams(stop_token_ids=range(16)), [20]) == Room(32, 64)
    assert room.with_room_for(SamplingParams(stop_token_ids=range(16), ignore_eos=True), [20]) == room
    assert room.with_room_for(SamplingParams(logit_bias=dict.fromkeys(range(300), 1)), []) == Room(16, 512)
    assert Room(16, 512).with_room_for(SamplingParams(), []) == Room(16, 512)


def test_wider_programs_are_certified_once_and_what_runs_goes_on():
    engine = fake_engine()
    engine.add(engine.request([1], SamplingParams(max_tokens=40), id="first"), stream=True)
    pieces = [update for _ in range(4) for update in engine.step()]
    before = dict(engine.certificates)
    asked = SamplingParams(max_tokens=3, logit_bias=dict.fromkeys(range(90), 0.0))
    engine.add(engine.request([5], asked, id="wide"))
    engine.add(engine.request([7], asked, id="wide too"))
    while engine.has_work:
        pieces += engine.step()
    assert engine.device.room == Room(16, 128)
    assert engine.num_preemptions == 1
    assert not set(map(id, before.values())) & set(map(id, engine.certificates.values()))
    first = [token for update in pieces if update.request.id == "first" for token in update.token_ids]
    assert first == list(range(2, 42))
    certificates = set(map(id, engine.certificates.values()))
    found = engine.generate([[9], [30]], [SamplingParams(max_tokens=2), asked])
    assert [c.token_ids for c in found] == [(10, 11), (31, 32, 33)]
    assert certificates == set(map(id, engine.certificates.values()))


def test_wider_programs_of_an_engine_that_was_prepared_are_for_any_traffic():
    """The first request waits for them; later ones, ordinary or more at once, need no others."""
    engine = fake_engine()
    engine.prepare()
    engine.generate([[5]], SamplingParams(max_tokens=2, stop_token_ids=range(20, 40)))
    batches = {(plan.batch, plan.ordinary, plan.processing) for plan in engine.certificates}
    assert {(4, False, True), (4, True, True)} <= batches
    engine.generate([[5]] * 4, [SamplingParams(max_tokens=2, deterministic=bool(i % 2)) for i in range(4)])
    assert batches == {(plan.batch, plan.ordinary, plan.processing) for plan in engine.certificates}
