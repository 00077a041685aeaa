"""Progress in a log file: what is done, how fast, and how long the rest will take."""

from detspec import progress
from detspec.progress import Progress


def test_log_lines_count_what_was_done_before_and_estimate_the_rest(capsys, monkeypatch):
    """6 of 10 were done before, 1 more took 20 s: the other 3 take a minute. Before that, nothing can be said."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with Progress(10, "requests", done=6) as shown:
        shown.stage("generating")
        clock[0] = 5.0
        shown.segment(100, 4)  # too soon for another line
        shown.finished()
        clock[0] = 10.0
        shown.segment(0, 3)
        clock[0] = 20.0
        shown.segment(100, 1, acceptance=0.9)
    assert capsys.readouterr().err.splitlines() == [
        "detspec: generating",
        "detspec: 7 of 10 requests, 10 tok/s, 3 live",
        "detspec: 7 of 10 requests, 10 tok/s, 1 live, 90.0% accepted, 0:01:00 left",
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


def test_counts_never_pass_the_total_and_no_time_left_is_negative(capsys, monkeypatch):
    """511 are said to be finished of 500: the last line shows 500, and no time that is left."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with Progress(500, "completions") as shown:
        shown.stage("generating")
        shown.finished(490)
        shown.finished(21)
        clock[0] = 20.0
        shown.segment(100, 1)
    assert capsys.readouterr().err.splitlines()[-1] == "detspec: 500 of 500 completions, 5 tok/s, 1 live"


def test_lines_of_a_worker_have_its_name_and_the_time_and_say_whom_it_waits_for_until_it_works_again(capsys, monkeypatch):
    """It waits from second 20 on, for another chunk after a while, and has work again in second 60."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(progress.time, "strftime", lambda form: form.replace("%S", f"{clock[0]:02.0f}"))
    with Progress(4, "completions", worker="a-1-x") as shown:
        shown.stage("generating", at_once=True)
        clock[0] = 20.0
        shown.finished(2)
        for clock[0], whose in ((20.0, "2 chunks: 2 at b-1-x"), (41.0, "1 chunk: 1 at b-1-x")):
            shown.waits(whose)
            shown.segment(0, 0)
        clock[0] = 60.0
        shown.segment(120, 1)
        shown.waits("1 chunk: 1 at c-1-x")
        clock[0] = 80.0
        shown.segment(0, 0)
    assert capsys.readouterr().err.splitlines() == [
        "detspec: %Y-%m-%d %H:%M:00 a-1-x: generating",
        "detspec: %Y-%m-%d %H:%M:20 a-1-x: 2 of 4 completions, waits since %H:%M:20 for 2 chunks: 2 at b-1-x",
        "detspec: %Y-%m-%d %H:%M:41 a-1-x: 2 of 4 completions, waits since %H:%M:20 for 1 chunk: 1 at b-1-x",
        "detspec: %Y-%m-%d %H:%M:60 a-1-x: 2 of 4 completions, 2 tok/s, 1 live, 0:01:00 left",
        "detspec: %Y-%m-%d %H:%M:80 a-1-x: 2 of 4 completions, waits since %H:%M:60 for 1 chunk: 1 at c-1-x",
    ]
