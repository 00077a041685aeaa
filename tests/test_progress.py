"""Progress in a log file: what is done, how fast, and how long the rest will take."""

from detspec import progress
from detspec.progress import Progress


def test_log_lines_count_what_was_done_before_and_estimate_the_rest(capsys, monkeypatch):
    """6 of 10 were done before, 1 more took 20 s: the other 3 take a minute."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with Progress(10, "requests", done=6) as shown:
        shown.stage("generating")
        clock[0] = 5.0
        shown.segment(100, 4)  # too soon for another line
        shown.finished()
        clock[0] = 20.0
        shown.segment(100, 3, acceptance=0.9)
    assert capsys.readouterr().err.splitlines() == [
        "detspec: generating",
        "detspec: 7 of 10 requests, 10 tok/s, 3 live, 90.0% accepted, 0:01:00 left",
    ]


def test_counts_that_become_known_late_and_stages_do_not_change_what_is_left(capsys, monkeypatch):
    """4 of 10 are found to be done, 2 more are done while compiling, and 1 in the 30 s after that: the other 3 take 90 s."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with Progress(0, "requests") as shown:
        clock[0] = 1.0
        shown.stage("reading", at_once=True)
        shown.count(4, 10)
        shown.stage("compiling", at_once=True)
        shown.stage("one of many")
        shown.finished(2)
        shown.stage("generating", at_once=True)
        clock[0] = 31.0
        shown.finished()
        shown.segment(90, 1)
    assert capsys.readouterr().err.splitlines() == [
        "detspec: reading",
        "detspec: compiling",
        "detspec: generating",
        "detspec: 7 of 10 requests, 3 tok/s, 1 live, 0:01:30 left",
    ]
