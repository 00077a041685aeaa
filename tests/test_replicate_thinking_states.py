"""The one command that replicates Thinking States, so small that it shows only the way from training to the report."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "replicate_thinking_states.py"


def test_quick_replication_trains_reports_and_does_nothing_twice(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location("replicate_thinking_states", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    only = ["--quick", "--only", "parity-cot-0", "--workdir", str(tmp_path / "runs"), "--out", str(tmp_path / "docs")]
    assert script.main(only) == 0
    paths = [tmp_path / "docs" / f"thinking_states.{suffix}" for suffix in ("json", "md", "png")]
    assert capfd.readouterr().out.split() == [str(path) for path in paths]
    found = json.loads(paths[0].read_text())
    assert list(found["runs"]) == ["parity-cot-0"]
    assert found["runs"]["parity-cot-0"]["command"] == "detspec train --config configs/replication.py:quick-parity-cot-0"
    assert "| parity-cot-0 | 2 |" in paths[1].read_text()
    assert paths[2].stat().st_size > 1000
    trained = (tmp_path / "runs" / "parity-cot-0" / "result.json").stat().st_mtime_ns
    assert script.main(only) == 0
    assert (tmp_path / "runs" / "parity-cot-0" / "result.json").stat().st_mtime_ns == trained
