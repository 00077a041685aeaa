"""The output of a job has the same bytes whatever happens to it: kills, resumes, shards, workers.

The controls leave out verification, so that a job that goes on in another batch writes other bytes, and alter one bit of one of
two records of the same line, which merging must refuse.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from detspec.jobs.files import journal_path, shard_path, sibling
from detspec.jobs.merge import merge
from scripts import soak_workers
from tests.engine.byte_model import load_folder
from tests.jobs.small_job import WHOLE, Crash, by_id, crash_after, job, names, some_lines, some_lines_and_bad_ones, start


def test_output_is_the_same_bytes_on_more_rows(three_rows, job_alone, tmp_path):
    assert job(three_rows, some_lines(), tmp_path / "out.jsonl") == job_alone


def test_control_output_of_ordinary_requests_has_other_bytes_on_more_rows(one_row, three_rows, tmp_path):
    found = [job(engine, some_lines(deterministic=False), tmp_path / "out.jsonl") for engine in (one_row, three_rows)]
    assert found[0] != found[1]


@pytest.mark.parametrize("engine_name", ["one_row", "three_rows"])
def test_output_of_shuffled_input_is_the_same_bytes_by_id(engine_name, job_alone, tmp_path, request):
    lines = some_lines()
    random.Random(3).shuffle(lines)
    found = job(request.getfixturevalue(engine_name), lines, tmp_path / "out.jsonl")
    assert by_id(found) == by_id(job_alone)
    assert found != job_alone


@pytest.mark.parametrize(("engine_name", "number"), [("one_row", 1), ("one_row", 4), ("three_rows", 1), ("three_rows", 3)])
def test_job_that_crashes_again_and_again_gives_the_same_bytes(engine_name, number, job_alone, tmp_path, monkeypatch, request):
    engine = request.getfixturevalue(engine_name)
    crash_after(monkeypatch, number)
    kept = [0]
    for _ in range(9):
        try:
            result = start(engine, some_lines(), tmp_path / "out.jsonl")
            break
        except Crash:
            assert not (tmp_path / "out.jsonl").exists()
            kept.append(journal_path(tmp_path / "out.jsonl").read_bytes().count(b"\n") - 1)
            assert kept[-1] > kept[-2]
    assert (tmp_path / "out.jsonl").read_bytes().splitlines() == job_alone
    assert result.stats["num_resumed"] == kept[-1] > 0
    assert result.stats["num_tokens"] == sum(len(json.loads(text)["token_ids"]) for text in job_alone)
    assert names(tmp_path) == WHOLE


def resumed_on_three_rows(one_row, three_rows, lines: list[bytes], out: Path) -> list[bytes]:
    """The output of a job that begins on one row, and goes on on three once three of its completions are there."""
    with pytest.MonkeyPatch.context() as crashing:
        crash_after(crashing, 3)
        with pytest.raises(Crash):
            start(one_row, lines, out)
    assert start(three_rows, lines, out).stats["num_resumed"] > 0
    return out.read_bytes().splitlines()


def test_job_that_resumes_on_another_number_of_rows_gives_the_same_bytes(one_row, three_rows, job_alone, tmp_path):
    assert resumed_on_three_rows(one_row, three_rows, some_lines(), tmp_path / "out.jsonl") == job_alone


def test_control_ordinary_job_that_resumes_on_another_number_of_rows_gives_other_bytes(one_row, three_rows, tmp_path):
    lines = some_lines(deterministic=False)
    whole = job(one_row, lines, tmp_path / "whole.jsonl")
    assert resumed_on_three_rows(one_row, three_rows, lines, tmp_path / "out.jsonl") != whole


def test_merged_shards_are_the_files_of_one_job(three_rows, tmp_path):
    out, single = tmp_path / "out.jsonl", tmp_path / "single.jsonl"
    start(three_rows, some_lines_and_bad_ones(), single, on_error="reject")
    paths = [shard_path(out, index, 4) for index in range(4)]
    for index in (2, 0, 3, 1):
        start(three_rows, some_lines_and_bad_ones(), paths[index], on_error="reject", shard=(index, 4))
    expected = {what: sibling(single, what).read_bytes() for what in ("manifest", "rejects")}
    for shards in ((), paths[::-1]):
        stats = merge(out, shards)
        assert out.read_bytes() == single.read_bytes()
        assert {what: sibling(out, what).read_bytes() for what in expected} == expected
    whole = json.loads(sibling(single, "stats").read_text())
    names_of_facts = ("num_requests", "num_rejected", "num_prompt_tokens", "num_tokens", "num_failed")
    assert {name: stats[name] for name in names_of_facts} == {name: whole[name] for name in names_of_facts}
    assert stats["num_shards"] == 4
    parts = [json.loads(sibling(path, "stats").read_text())["last_start"] for path in paths]
    assert stats["last_start"]["num_tokens"] == stats["num_tokens"]
    assert stats["last_start"]["num_verify_passes"] == sum(part["num_verify_passes"] for part in parts) > 0
    assert stats == json.loads(sibling(out, "stats").read_text())
    for path in (*paths, *(sibling(path, "manifest") for path in paths)):
        assert path.exists()  # merging leaves the shards


@pytest.fixture(scope="module")
def soaked(tmp_path_factory) -> dict[str, Any]:
    """Findings about three workers. No verdict depends on the clock: signals come when so many lines are done."""
    folder = tmp_path_factory.mktemp("soak")
    load_folder(folder / "model")
    sizes = ["--rounds", "1", "--workers", "3", "--kills", "3", "--frozen", "1", "--most-frozen-s", "2", "--requests", "160"]
    soak_workers.main(["--workdir", str(folder), "--model", str(folder / "model"), *sizes])
    return json.loads((folder / "soak_workers.json").read_text())


@pytest.mark.slow
def test_workers_that_are_killed_stopped_and_frozen_give_the_bytes_of_one_process(soaked):
    [facts] = soaked["rounds"]
    assert sum(facts["signals"].values()) == 4
    assert soaked["same_bytes"]


@pytest.mark.slow
def test_control_record_of_two_that_is_altered_by_a_bit_is_not_merged(soaked):
    assert soaked["control_found"]
