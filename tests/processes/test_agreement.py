"""The host loops of two processes, as two threads with a device each that counts up, and with clocks that are wrong.

Real devices would wait for each other for ever where their programs differ. Here each keeps a list of what it was told to run.
"""

import dataclasses
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from detspec.engine import decide
from detspec.engine.agreement import SEGMENTS, Alone, Processes, agreement_of
from detspec.engine.decide import StepTimes
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Room
from detspec.engine.request import Request
from detspec.errors import DivergenceError
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.engine.fake_device import FakeDevice
from tests.processes.skewed_clock import SkewedClock

SCHEDULE = Schedule(Numerics(page=4), Budget(16, 4))
CONFIG = EngineConfig(max_requests=8, max_len=64, num_speculative_tokens=3, segment_steps=4)
PATIENCE_S = 300  # what would wait for ever is ended


class Recorded(FakeDevice):
    """Keeps what it is told to run, but trial runs; whether a segment ends before the host looks is a matter of luck."""

    def __init__(self, seed: int) -> None:
        super().__init__(SCHEDULE, CONFIG)
        self.runs: list[tuple] = []
        self._random = random.Random(seed)

    def prefill(self, placement, passes, *, schedule=None, answers=False):
        report = super().prefill(placement, passes, schedule=schedule, answers=answers)
        self.runs.append(("prefill", passes, placement.page_table.tobytes()))
        report.is_ready = self._random.random() < 0.3
        return report

    def step(self, plan, placement, limits, *, wide_cost=None):
        report = super().step(plan, placement, limits, wide_cost=wide_cost)
        self.runs.append((plan.label, limits, placement.page_table.tobytes(), placement.chosen.tolist()))
        report.is_ready = self._random.random() < 0.3
        return report


class Meeting:
    """`exchange` of two threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=PATIENCE_S)
        self._contents = [b"", b""]
        self.num_held = 0

    def exchange_fn(self, index: int):
        def exchange(content: bytes) -> list[bytes]:
            self._contents[index] = content
            self._barrier.wait()
            contents = list(self._contents)
            self.num_held += index == 0
            self._barrier.wait()
            return contents

        return exchange


def requests(number: int, first: int = 0) -> list[Request]:
    """Prompts of 1 to 20 tokens, of which many begin alike, and 3 to 30 new tokens."""
    return [
        Request(
            f"r{i}",
            tuple((i % 3 + k) % 97 for k in range(1 + 7 * i % 20)),
            SamplingParams(max_tokens=3 + 11 * i % 28, seed=i, deterministic=i % 5 != 0),
        )
        for i in range(first, first + number)
    ]


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch):
    """Each thread measures by a clock of its own."""
    clocks = threading.local()

    def perf_counter() -> float:
        if not hasattr(clocks, "own"):
            clocks.own = SkewedClock(threading.get_ident())
        return clocks.own.perf_counter()

    wrong = SimpleNamespace(perf_counter=perf_counter)
    monkeypatch.setattr(decide, "time", wrong)
    monkeypatch.setattr("detspec.engine.certify.time", wrong)


def run_two(drive, agreements) -> list[Recorded]:
    """`drive(index, engine)` in two threads; raises what the first of them raised."""
    devices = [Recorded(seed) for seed in range(2)]
    errors: list[list[BaseException]] = [[], []]

    def run(index: int) -> None:
        try:
            drive(index, Engine.over(devices[index], agreements[index]))
        except BaseException as error:
            errors[index].append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    for found in errors:
        if found:
            raise found[0]
    return devices


def complete_all(number: int):
    def drive(index: int, engine: Engine) -> None:
        engine.prepare()
        assert sum(1 for _ in engine.run(iter(requests(number)))) == number

    return drive


def num_segments(device: Recorded) -> int:
    return sum(run[0] != "prefill" for run in device.runs)


@pytest.mark.parametrize("number", [400, pytest.param(8000, marks=pytest.mark.sweep)])
def test_processes_with_skewed_clocks_run_the_same_programs(skewed, number: int):
    meeting = Meeting()
    first, second = run_two(complete_all(number), [Processes(index, meeting.exchange_fn(index)) for index in range(2)])
    assert first.runs == second.runs
    assert len(set(first.steps_of)) > 2  # plans of several kinds ran
    assert num_segments(first) > number / 4
    assert meeting.num_held < num_segments(first) / SEGMENTS + 50  # those of certificates and times come before


def test_processes_give_wide_requests_room_at_the_same_moment(skewed):
    """Every ninth request has more biased tokens than there is room for."""
    meeting = Meeting()
    wide = [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, logit_bias=dict.fromkeys(range(90), 0)))
        if number % 9 == 8
        else request
        for number, request in enumerate(requests(80))
    ]

    def drive(index: int, engine: Engine) -> None:
        engine.prepare()
        assert sum(1 for _ in engine.run(iter(wide))) == len(wide)

    first, second = run_two(drive, [Processes(index, meeting.exchange_fn(index)) for index in range(2)])
    assert first.runs == second.runs
    assert first.room == second.room == Room(16, 128)


def test_processes_that_do_not_agree_run_other_programs(skewed):
    first, second = run_two(complete_all(400), [Alone(), Alone()])
    assert first.runs != second.runs


def test_other_requests_end_both_processes_with_the_decisions_of_both():
    meeting = Meeting()

    def drive(index: int, engine: Engine) -> None:
        list(engine.run(iter(requests(40) if index == 0 else requests(40, first=1))))

    with pytest.raises(DivergenceError, match=r"(?s)process 0:\n.*r0.*process 1:\n.*r8"):
        run_two(drive, [Processes(index, meeting.exchange_fn(index)) for index in range(2)])


def test_other_certificates_end_both_processes_before_a_step():
    meeting = Meeting()

    def drive(index: int, engine: Engine) -> None:
        engine.agreement.check(f"8x1[8]: {('certified', 'differs')[index]}")

    with pytest.raises(DivergenceError, match=r"(?s)process 0:\n8x1\[8\]: certified\nprocess 1:\n8x1\[8\]: differs"):
        run_two(drive, [Processes(index, meeting.exchange_fn(index)) for index in range(2)])


@pytest.mark.parametrize("index_of_signal", [0, 1])
def test_signal_at_one_process_stops_both_after_the_same_segment(skewed, index_of_signal: int):
    meeting = Meeting()
    stopped_at = [0, 0]

    def drive(index: int, engine: Engine) -> None:
        for request in requests(60):
            engine.add(request)
        signal = 0
        while engine.has_work:
            if index == index_of_signal and num_segments(engine.device) >= 30:
                signal = 15
            if engine.agreement.stops(signal):
                break
            engine.step()
        stopped_at[index] = num_segments(engine.device)
        assert engine.agreement.ended(signal) == 15

    first, second = run_two(drive, [Processes(index, meeting.exchange_fn(index)) for index in range(2)])
    assert first.runs == second.runs
    assert stopped_at[0] == stopped_at[1] <= 30 + 2 * SEGMENTS + num_trial_segments()


def test_aborted_request_ends_in_both_processes_after_the_same_segment():
    meeting = Meeting()
    reasons: list[dict[str, str]] = [{}, {}]

    def drive(index: int, engine: Engine) -> None:
        for request in requests(60):
            engine.add(request)
        engine.abort("r59") if index == 1 else None
        while engine.has_work:
            for update in engine.step():
                if update.completion is not None:
                    reasons[index][update.request.id] = update.completion.finish_reason

    first, second = run_two(drive, [Processes(index, meeting.exchange_fn(index)) for index in range(2)])
    assert first.runs == second.runs
    assert reasons[0] == reasons[1]
    assert [id for id, reason in reasons[0].items() if reason == "abort"] == ["r59"]


def test_one_process_is_alone_and_hears_of_its_own_measurements_at_once():
    agreement = agreement_of(None)
    times = StepTimes()
    assert isinstance(agreement, Alone)
    assert agreement.observer(times) == times.observed
    assert agreement.visit_s(0.25) == 0.25
    assert agreement.exchange(b"x") == [b"x"]
    assert agreement.aborts("r0")
    assert agreement.finished([]) == []


def test_measurements_become_those_of_the_first_process_bit_for_bit():
    meeting = Meeting()
    own = [[0.1, 1 / 3, float("inf")], [7.0, 8.0, 9.0]]
    found = [[], []]

    def drive(index: int, engine: Engine) -> None:
        found[index] = engine.agreement.same(own[index])

    run_two(drive, [Processes(index, meeting.exchange_fn(index)) for index in range(2)])
    assert np.asarray(found, np.float64).tobytes() == np.asarray([own[0]] * 2, np.float64).tobytes()


def num_trial_segments() -> int:
    """Segments of certificates that a device runs before the first of requests, at most."""
    device = Recorded(0)
    Engine.over(device).prepare()
    return num_segments(device)
