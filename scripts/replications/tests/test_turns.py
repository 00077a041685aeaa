"""Timing in turn."""

from scripts.replications.turns import time_by_turns


def test_turns_prepare_outside_the_clock_and_leave_out_the_first_round():
    calls: list[str] = []

    def prepare_of(name: str):
        def prepare():
            calls.append(f"prepare {name}")
            return lambda: calls.append(name)

        return prepare

    seconds = time_by_turns({"a": prepare_of("a"), "b": prepare_of("b")}, repeats=2)
    assert calls == ["prepare a", "a", "prepare b", "b"] * 3
    assert {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2}
