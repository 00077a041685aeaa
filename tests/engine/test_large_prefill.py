"""Prompts that are read in large passes: the bits of small ones, where that is certified, and only while nobody waits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.engine import policy
from detspec.engine.device import Device
from detspec.engine.engine import Engine
from detspec.engine.policy import Needs, as_large
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.engine.byte_model import facts, make_engine, some_sampling

PINNED = Schedule(Numerics(page=16, linear="pinned"), Budget(16, 4))  # prefill may have a program of its own
ROWS = 64
NEEDS = Needs.of([SamplingParams()])


@pytest.fixture(autouse=True, scope="module")
def smaller_passes():
    """Large ones have four times the schedule's rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "LARGE_ROWS", ROWS)
        yield


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, int]]:
    """The rows and the number of passes over prompts that were started."""
    noted: list[tuple[int, int]] = []
    prefill = Device.prefill

    def noting(device, placement, passes, *, schedule=None, answers=False):
        noted.append(((schedule or device.schedule).budget.rows, passes))
        return prefill(device, placement, passes, schedule=schedule, answers=answers)

    monkeypatch.setattr(Device, "prefill", noting)
    return noted


def engine_of(model, **changes) -> Engine:
    return make_engine(model, 4, "none", schedule=PINNED, prefix_sharing=False, **changes)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


PROMPTS = prompts_of(30, 17, 2, 29)


@pytest.fixture(scope="module")
def expected(model) -> list:
    """Completions by passes of the schedule's rows alone."""
    engine = engine_of(model)
    assert not engine.device.prefills_large  # what requests wait for is one program less
    return list(map(facts, engine.generate(PROMPTS, some_sampling(4))))


def test_prompts_in_large_passes_have_the_bits_of_small_ones(model, expected, passes):
    engine = engine_of(model)
    engine.prepare(4, NEEDS)
    assert engine.device.prefills_large
    passes.clear()
    assert list(map(facts, engine.generate(PROMPTS, some_sampling(4)))) == expected
    assert passes == [(ROWS, 1), (16, 1)]  # 29, 16, 1 and 28 positions are 20 windows of 4


def spoil_large(monkeypatch, fn) -> None:
    """Lets large passes leave `fn` of the floats that they should."""
    prefill = Device.prefill

    def spoiling(device, placement, passes, *, schedule=None, answers=False):
        report = prefill(device, placement, passes, schedule=schedule, answers=answers)
        if schedule == device.large:
            pools = jax.tree.map(fn, device.state.cache.pools)
            device.state = device.state.replace(cache=device.state.cache.replace(pools=pools))
        return report

    monkeypatch.setattr(Device, "prefill", spoiling)


def test_large_passes_of_other_bits_are_not_used(model, expected, passes, monkeypatch):
    spoil_large(monkeypatch, lambda x: jnp.nextafter(x, jnp.inf))
    engine = engine_of(model)
    engine.prepare(4, NEEDS)
    assert not engine.device.prefills_large
    passes.clear()
    assert list(map(facts, engine.generate(PROMPTS, some_sampling(4)))) == expected
    assert {rows for rows, _ in passes} == {16}


def test_what_large_passes_leave_is_what_sequences_go_on_from(model, expected, monkeypatch):
    """The inverse control."""
    engine = engine_of(model)
    engine.prepare(4, NEEDS)
    spoil_large(monkeypatch, lambda x: 2 * x)
    assert list(map(facts, engine.generate(PROMPTS, some_sampling(4)))) != expected


def test_nobody_who_decodes_waits_for_a_large_pass(model, passes):
    """Three passes read the others' prompts; one large pass would take their place."""
    engine = engine_of(model, max_prefill_passes=8)
    engine.prepare(4, NEEDS)
    first, *others = PROMPTS
    engine.add(engine.request(first, SamplingParams(max_tokens=30, ignore_eos=True), id="first"), stream=True)
    while not engine.step():
        pass
    passes.clear()
    for prompt in others:
        engine.add(engine.request(prompt, SamplingParams(max_tokens=4), id=str(len(prompt))))
    while engine.has_work:
        engine.step()
    assert {rows for rows, _ in passes} == {16}
    assert (16, 3) in passes


def test_large_passes_are_made_where_they_can_be_filled(model):
    assert engine_of(model).device.may_prefill_large
    assert not make_engine(model, 1, "none", schedule=PINNED, max_len=48).device.may_prefill_large  # fewer positions
    assert not make_engine(model, 4, "none").device.may_prefill_large  # XLA's products
    larger = PINNED.with_budget(32, 4)
    assert not make_engine(model, 4, "none", schedule=larger).device.may_prefill_large  # twice the rows


def test_passes_that_large_ones_take_the_place_of():
    assert [as_large(passes, 8) for passes in (0, 3, 4, 8, 11, 12)] == [(0, 0), (0, 3), (1, 0), (1, 0), (1, 3), (2, 0)]
