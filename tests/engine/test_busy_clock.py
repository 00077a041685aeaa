"""Times of the host's visits by a clock, also when it is set back."""

import time

import pytest

from detspec.engine.decide import BusyClock


@pytest.fixture
def now(monkeypatch):
    """The time, which tests set."""
    time_is = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: time_is[0])
    return time_is


def visited(clock, now, seconds):
    """The rest of a segment, 10 ms, and a visit that takes `seconds` by the clock; the device works again."""
    now[0] += 0.010
    clock.free()
    now[0] += seconds
    clock.work()


def test_visit_time_approaches_what_visits_take(now):
    clock = BusyClock()
    clock.work()
    for _ in range(200):
        visited(clock, now, 0.002)
    assert clock.visit_s == pytest.approx(0.002, rel=0.01)


def test_visit_time_of_a_clock_that_is_set_back_stays_what_was_measured(now):
    clock = BusyClock()
    clock.work()
    for _ in range(200):
        visited(clock, now, 0.002)
    before = clock.visit_s
    for _ in range(50):
        visited(clock, now, -3600.0)
    assert clock.visit_s == pytest.approx(before, rel=0.01)
    assert clock.idle_s > 0
