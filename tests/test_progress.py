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
        shown.finished(acceptance=0.9)
        clock[0] = 20.0
        shown.segment(100, 3)
    assert capsys.readouterr().err.splitlines() == [
        "detspec: generating",
        "detspec: 7 of 10 requests, 10 tok/s, 3 live, 90.0% accepted, 0:01:00 left",
    ]
