"""The comparison of drafts: its workloads, its table, and a small run of it."""

import json

import pytest

import detspec as ds
from scripts.bench_drafts import NEW, asks_of, main, table


def row(workload: str, speed: float) -> dict:
    return {"requests": 8, "workload": workload, "speed": {"ngram": speed}, "tokens_a_step": {"ngram": 2.0}, "same_bits": True}


def test_table_has_a_line_for_each_workload_and_their_geometric_mean():
    lines = table([row("code", 2.0), row("T 1", 0.5) | {"same_bits": False}], ["ngram"]).splitlines()
    assert lines[-3:] == [
        "| 8 | code | 2.00 (2.00) | yes |",
        "| 8 | T 1 | 0.50 (2.00) | NO |",
        "| all | geometric mean | 1.00 | |",
    ]


def test_workloads_have_as_many_requests_as_asked_for():
    model = ds.load()
    for workload, temperatures in (("code", {0.0}), ("random", {0.0}), ("T 0.8", {0.8}), ("T 1", {1.0})):
        asks = asks_of(workload, model, 11)
        assert len(asks) == 11
        assert {ask.temperature for ask in asks} == temperatures
    assert asks_of("code", model, 9)[8] == asks_of("code", model, 9)[0]


@pytest.mark.slow
def test_prompt_lookup_is_measured_with_equal_bits(tmp_path, capsys):
    found = tmp_path / "drafts.json"
    command = ["--requests", "1", "--workloads", "code", "--methods", "none", "ngram", "--repeats", "1", "--json", str(found)]
    assert main(command) == 0
    (measured,) = json.loads(found.read_text())["rows"]
    assert measured["same_bits"]
    assert measured["tokens_a_step"]["none"] == 1.0
    assert 1.0 < measured["tokens_a_step"]["ngram"] <= 16
    assert f"| 1 | code | {measured['speed']['none']:.2f}" in capsys.readouterr().out
    assert json.loads(found.read_text())["new_tokens"] == NEW
