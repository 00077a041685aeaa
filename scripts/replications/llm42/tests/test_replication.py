"""The replication of LLM-42 by its one command, so small that it shows only that every step works."""

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.replications.llm42.__main__ import ROOT, main
from scripts.replications.llm42.headlines import PANELS
from scripts.replications.llm42.measure import MEASUREMENTS, all_runs
from scripts.replications.llm42.predicted import predictions
from scripts.replications.llm42.report import is_reproducible
from scripts.replications.llm42.shares import MAX_LEN, WORKLOADS, lengths_of
from scripts.replications.llm42.spans import agreements
from scripts.replications.llm42.traffic import arrivals, mixed, requests_of


def test_unknown_measurement_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "nothing", "--workdir", str(tmp_path)])
    assert "no measurement nothing; there are passes, products, " in capsys.readouterr().err


def test_every_panel_has_a_measurement_and_all_run_alone_on_all_cores():
    assert {panel.run for panel in PANELS} | {"repeats"} == set(MEASUREMENTS)
    assert all(run.alone and not run.one_thread for run in all_runs())
    assert [run.name for run in all_runs(["speeds"])] == ["speeds"]


def test_agreements_are_the_first_difference_and_what_follows():
    assert agreements("abcde", "abxdy") == (2, 1)
    assert agreements("abc", "xbc") == (0, 2)
    assert agreements("abc", "abc") == (None, None)


def test_poisson_arrivals_have_their_mean_and_scale():
    due = np.array(arrivals(4000, 2.0))
    assert (np.diff(due) > 0).all()
    assert 1.8 < due[-1] / 4000 < 2.2
    assert np.allclose(2 * due, arrivals(4000, 4.0), rtol=1e-12)  # the same draws


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_fit_the_engine_at_every_scale(workload: str):
    for scale in (1.0, 0.0625):
        for prompt, new in lengths_of(workload, 64, scale=scale):
            assert prompt + new <= round(MAX_LEN * scale)


def test_larger_shares_include_smaller_ones():
    class Model:
        tokenizer = None
        cfg = type("Config", (), {"vocab_size": 50})

    requests = requests_of(Model(), [(4, 2)] * 20)
    chosen = [
        {request.id for request in mixed(requests, share) if request.sampling.deterministic} for share in (0, 10, 50, 100)
    ]
    assert [len(ids) for ids in chosen] == [0, 2, 10, 20]
    assert chosen[1] < chosen[2] < chosen[3]


def test_predicted_passes_get_slower_with_rows_and_drafts_help_where_rows_are_free():
    found = predictions(rows=(1, 64, 1024), batch=16, windows=(4, 8), groups=(1, 16), max_rows=128)
    for device in found.values():
        few, some, many = (one["ms"] for one in device["passes"])
        assert few <= some < many
        assert some < 2 * few  # reading the weights is the bound
        assert [(one["window"], one["groups"]) for one in device["speeds"]] == [(4, 1), (4, 16), (8, 1), (8, 16)]


@pytest.mark.parametrize("changed", [{"deterministic_variants": 2}, {"digest_variants": 2}])
def test_two_results_of_a_deterministic_request_are_noticed(changed: dict[str, int]):
    bits = {"deterministic_variants": 1, "digest_variants": 1}
    assert is_reproducible({"speeds": {"bits": bits}})
    assert not is_reproducible({"speeds": {"bits": {**bits, **changed}}})
    assert not is_reproducible({"repeats": {"unique": 2, "unique_digests": 1}})


@pytest.mark.slow
def test_tiny_replication_reports_and_does_nothing_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    arguments = ["--size", "tiny", "--only", "products", "online", "repeats", "--workdir", str(tmp_path / "runs")]
    assert main([*arguments, "--out", str(tmp_path / "docs")]) == 0
    paths = [tmp_path / "docs" / name for name in ("data/llm42.json", "llm42.md", "llm42.png")]
    assert capfd.readouterr().out.split() == [str(path) for path in paths]
    results = json.loads(paths[0].read_text())["results"]
    assert results["online"]["bits"]["deterministic_variants"] == results["online"]["bits"]["digest_variants"] == 1
    assert results["online"]["bits"]["deterministic_results"] > 8
    assert results["repeats"]["times"] == 9
    assert results["repeats"]["unique"] == 1
    page = paths[1].read_text()
    assert "## 8. P99 time to first token over ordinary" in page
    assert page.count("| met |") + page.count("| missed |") == 4
    assert paths[2].stat().st_size > 10_000
    measured = (tmp_path / "runs" / "online" / "result.json").stat().st_mtime_ns
    assert main(arguments) == 0  # the report of a trial stays away from docs
    assert (tmp_path / "runs" / "llm42.md").read_text() == page
    assert (tmp_path / "runs" / "online" / "result.json").stat().st_mtime_ns == measured
