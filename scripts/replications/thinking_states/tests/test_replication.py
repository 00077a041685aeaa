"""The whole replication by its one command, so small that it shows only that every step works."""

import json
from pathlib import Path

import pytest

from scripts.replications.thinking_states.__main__ import main
from scripts.replications.thinking_states.measure import ROOT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--width", "0"], "--width must be at least 1, got 0"), (["--only", "nothing"], "no run nothing; there are ")],
)
def test_invalid_options_are_rejected(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--workdir", str(tmp_path)])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_quick_replication_trains_reports_and_does_nothing_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    only = ["--quick", "--only", "parity-coconut-0", "--workdir", str(tmp_path / "runs")]
    assert main([*only, "--out", str(tmp_path / "docs")]) == 0
    paths = [tmp_path / "docs" / f"results.{suffix}" for suffix in ("json", "md", "png")]
    assert capfd.readouterr().out.split() == [str(path) for path in paths]
    found = json.loads(paths[0].read_text())
    assert list(found["runs"]) == ["parity-cot-0", "parity-coconut-0"]
    for name, latents, start in (("parity-cot-0", None, None), ("parity-coconut-0", 1, "parity-cot-0")):
        command = f"detspec train --config scripts/replications/thinking_states/config.py:quick-{name}"
        one = found["runs"][name]
        assert (one["command"], one["latents"], one["starts_from"]) == (command, latents, start)
        assert f"| {name} | 2 |" in paths[1].read_text()
    assert paths[2].stat().st_size > 1000
    trained = (tmp_path / "runs" / "parity-coconut-0" / "result.json").stat().st_mtime_ns
    assert main(only) == 0  # the report of a trial stays away from the full one
    assert capfd.readouterr().out.split() == [str(tmp_path / "runs" / path.name) for path in paths]
    assert (tmp_path / "runs" / "parity-coconut-0" / "result.json").stat().st_mtime_ns == trained
