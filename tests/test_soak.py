"""The long soak: its clocks, journal, damage and verdicts, and whether a tiny one runs; the long one takes hours."""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from detspec.engine.compiled import _jax_hits
from detspec.engine.request import ABORTED
from scripts.soak.answers import Answer, num_different
from scripts.soak.caches import empty_cache
from scripts.soak.clocks import wrong_clocks
from scripts.soak.disk import empty_folder
from scripts.soak.drawing import draw_shapes, draw_way
from scripts.soak.job_trials import compared
from scripts.soak.killing import Killed, Pace
from scripts.soak.record import Journal
from scripts.soak.report import BEGIN, END, report, tables, write
from scripts.soak.requests import Material, random_texts, some_lines
from scripts.soak.sizes import SIZES
from scripts.soak.tampering import one_byte_flipped, one_record_altered

ROOT = Path(__file__).parents[1]
ANSWER = Answer([5, 6], [1, 2], "ab", "stop")
LINES = [json.dumps({"id": str(i), "token_ids": [i, i + 1], "logprobs": [-0.5, -1.5]}).encode() + b"\n" for i in range(3)]


def test_clocks_jump_back_and_forth_and_are_right_afterwards():
    right = time.monotonic
    with wrong_clocks(0):
        looks = [time.monotonic() for _ in range(400)]
    steps = [after - before for before, after in itertools.pairwise(looks)]
    assert max(steps) > 60
    assert min(steps) < -60
    assert time.monotonic is right
    with wrong_clocks(None):
        assert time.monotonic is right


def test_in_an_empty_cache_all_is_compiled_anew_and_afterwards_the_usual_one_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "usual"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "restored by monkeypatch")

    def num_found() -> int:
        before = _jax_hits()
        jax.jit(lambda x: x * 3 + 1)(np.ones(7, np.float32))
        return _jax_hits() - before

    num_found()
    assert num_found() > 0
    with empty_cache(tmp_path / "empty", tmp_path / "usual"):
        assert num_found() == 0
        assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "empty")
    assert num_found() > 0
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "usual")
    assert not (tmp_path / "empty").exists()


def test_journal_loses_a_torn_line_when_it_is_appended_to_and_not_when_it_is_read(tmp_path):
    journal = Journal(tmp_path / "a.jsonl", appends=True)
    journal.started(3, {})
    journal.add({"kind": "job", "tokens": 4})
    with journal.path.open("a") as file:
        file.write('{"kind": "jo')
    torn = journal.path.read_bytes()
    assert [entry["tokens"] for entry in Journal(journal.path).trials] == [4]
    assert journal.path.read_bytes() == torn
    again = Journal(journal.path, appends=True)
    again.add({"kind": "job", "tokens": 5})
    assert [entry["tokens"] for entry in Journal(journal.path).trials] == [4, 5]
    with pytest.raises(SystemExit, match="--seed 3, not 4"):
        again.started(4, {})


@pytest.mark.parametrize(
    ("found", "differ"),
    [
        (ANSWER, 0),
        (ANSWER._replace(bits=[1, 3]), 1),
        (ANSWER._replace(token_ids=[4, 6]), 1),
        (ANSWER._replace(text="ac"), 1),
        (Answer([5], [1], "a", "stop"), 1),
        (Answer([5], [1], "a", ABORTED), 0),
        (Answer([5], [2], "a", ABORTED), 1),
        (Answer([5], [1], "b", ABORTED), 1),
    ],
)
def test_answers_differ_in_tokens_bits_and_endings_and_an_aborted_one_may_be_short(found: Answer, differ: int):
    assert num_different([(found, ANSWER), (ANSWER, ANSWER)]) == (differ, len(found.token_ids) + 2)


def test_lines_that_differ_are_missing_or_are_too_many_are_counted():
    expected = b"".join(LINES)
    assert compared(expected, expected) == {"lines": 3, "tokens": 6, "differ": 0}
    assert compared(b"".join(LINES[::-1]), expected)["differ"] == 2
    assert compared(LINES[0], expected)["differ"] == 2
    assert compared(expected + LINES[0], expected)["differ"] == 1


def test_lines_that_a_journal_no_longer_holds_are_lost_unless_the_output_is_whole(tmp_path):
    with empty_folder(tmp_path / "disk", mounts=False) as disk:
        out = disk.folder / "out.jsonl"
        killed = Killed((), out, 3, disk, tmp_path, Pace())
        journal = disk.folder / "out.jsonl.journal"
        journal.write_bytes(b"header\n" + b"".join(LINES[:2]) + LINES[2][:5])
        held = killed._held()
        assert held == [line.rstrip() for line in LINES[:2]]
        journal.write_bytes(b"header\n" + LINES[1])
        assert killed._num_lost(held) == 1
        journal.unlink()
        assert killed._num_lost(held) == 2
        out.touch()
        assert killed._num_lost(held) == 0


@pytest.mark.parametrize("seed", range(20))
def test_damage_changes_one_byte_or_one_record_and_no_end_of_a_line(seed: int):
    raw = b"".join(LINES)
    flipped = one_byte_flipped(raw, random.Random(seed), before=len(LINES[0]))
    assert sum(one != other for one, other in zip(raw, flipped, strict=True)) == 1
    assert flipped.count(b"\n") == 3
    assert compared(one_record_altered(raw, random.Random(seed)), raw)["differ"] == 1


def test_trials_draw_every_value_and_the_same_ones_from_the_same_seed():
    shapes = draw_shapes(random.Random("0/shapes"), SIZES["full"])
    assert {shape.max_requests for shape in shapes} == {1, 3, 8, 32}
    assert {shape.model for shape in shapes} == {"shipped", "random", "tied"}
    assert {shape.chips for shape in shapes} == {1, 2, 4}
    assert shapes == draw_shapes(random.Random("0/shapes"), SIZES["full"])
    assert draw_way(random.Random(1)) == draw_way(random.Random(1))
    material = Material(random_texts(256, 100), most_prompt=20, most_new=9)
    assert some_lines(material, 9, seed=1) == some_lines(material, 9, seed=1) != some_lines(material, 9, seed=2)


def some_trials(folder: Path, **changes: object) -> Path:
    """Journals of an engine's trial, in which `changes` happened, and of a job's."""
    engine = {"tokens": 7, "differ": 0, "max_requests": 8, "segment_steps": None, "controls": {"scored": [1, 1]}}
    job = {"tokens": 5, "lines": 2, "differ": 0, "kills": {"SIGKILL running": 2}, "options": {}, "controls": {}}
    for name, entry in {"engines": {**engine, **changes}, "jobs": job}.items():
        journal = Journal(folder / f"{name}.jsonl", appends=True)
        journal.started(0, {"device_kind": "a device", "jax": "1", "jaxlib": "2"})
        journal.add({"kind": name, "as_expected": True, "seconds": 1.0, **entry})
    return folder


def test_report_counts_both_journals(tmp_path):
    found = report(some_trials(tmp_path))
    assert found["sound"]
    assert found["tokens"] == {"engines": 7, "jobs": 5}
    assert (found["differ"], found["jobs"]["killed"], found["controls"]) == (0, 2, {"ordinary answers, scored": [1, 1]})
    assert found["axes"]["batch size"] == {"8": [1, 7]}
    text = tables(found)
    assert text.startswith("This run is not at its end: 7 of 1,000,000 tokens in engines, 2 of 1,000 kills.")
    assert "| committed tokens compared, in engines | 7 |" in text
    assert "| tokens between looks of the host | the engine's choice: 7 |" in text
    assert "| ordinary answers, scored | 1 | 1 |" in text


def test_report_of_a_trial_that_was_not_as_expected_is_not_sound(tmp_path):
    found = report(some_trials(tmp_path, differ=3, as_expected=False))
    assert not found["sound"]
    assert found["differ"] == 3
    assert len(found["unexpected"]) == 1
    assert not report(tmp_path / "none")["sound"]


def test_report_is_written_between_its_marks(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "soak.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    found = report(some_trials(tmp_path))
    write(found, tmp_path)
    assert json.loads((tmp_path / "data" / "soak.json").read_text()) == found
    assert (tmp_path / "soak.md").read_text() == f"before\n{BEGIN}\n{tables(found)}\n{END}\nafter\n"


def test_page_shows_what_is_in_the_file_of_results():
    found = json.loads((ROOT / "docs" / "data" / "soak.json").read_text())
    assert f"{BEGIN}\n{tables(found)}\n{END}" in (ROOT / "docs" / "soak.md").read_text()
    assert found["sound"] == (not found["unexpected"])


@pytest.mark.slow
def test_tiny_soak_is_as_expected_and_goes_on_where_it_was(tmp_path):
    """A trial of each part runs. Its engine streams to requests that come between steps, and gets other weights in between."""
    sizes = ["--size", "tiny", "--tokens", "100", "--kills", "1", "--kills-per-job", "2", "--seed", "4956"]
    command = [sys.executable, "-m", "scripts.soak", "--workdir", str(tmp_path), *sizes]

    def run(*extra: str) -> str:
        done = subprocess.run([*command, *extra], cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    assert "all trials as expected" in run()
    found = report(tmp_path)
    assert found["tokens"]["engines"] >= 100
    assert found["jobs"]["killed"] >= 1
    assert found["differ"] == found["jobs"]["lost"] == found["jobs"]["debris"] == 0
    assert found["controls"]["answers with other weights"] == [1, 1]
    run("--part", "jobs")  # has nothing left to do
    assert report(tmp_path)["jobs"] == found["jobs"]
