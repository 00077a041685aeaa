"""The one command that replicates Thinking States, so small that it shows only the way from training to the report."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "replicate_thinking_states.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replicate_thinking_states", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--width", "0"], "--width must be at least 1, got 0"), (["--only", "nothing"], "no run nothing; there are ")],
)
def test_options_of_no_sense_are_refused(script: ModuleType, arguments: list[str], message: str, tmp_path: Path, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.main([*arguments, "--workdir", str(tmp_path)])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_quick_replication_trains_reports_and_does_nothing_twice(
    script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    only = ["--quick", "--only", "parity-cot-0", "--workdir", str(tmp_path / "runs")]
    assert script.main([*only, "--out", str(tmp_path / "docs")]) == 0
    paths = [tmp_path / "docs" / f"thinking_states.{suffix}" for suffix in ("json", "md", "png")]
    assert capfd.readouterr().out.split() == [str(path) for path in paths]
    found = json.loads(paths[0].read_text())
    assert list(found["runs"]) == ["parity-cot-0"]
    assert found["runs"]["parity-cot-0"]["command"] == "detspec train --config configs/replication.py:quick-parity-cot-0"
    assert "| parity-cot-0 | 2 |" in paths[1].read_text()
    assert paths[2].stat().st_size > 1000
    trained = (tmp_path / "runs" / "parity-cot-0" / "result.json").stat().st_mtime_ns
    assert script.main(only) == 0  # the report of a trial stays away from the one in docs
    assert capfd.readouterr().out.split() == [str(tmp_path / "runs" / path.name) for path in paths]
    assert (tmp_path / "runs" / "parity-cot-0" / "result.json").stat().st_mtime_ns == trained
