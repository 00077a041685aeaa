"""The benchmark of kernels runs, small and in the interpreter, so that it is ready where there is a device."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from detspec.schedule import Schedule

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_kernels.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_kernels", SCRIPT)
    module = sys.modules["bench_kernels"] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_kernels"]


@pytest.mark.slow
@pytest.mark.kernels
def test_main_times_every_kernel_beside_its_measure(script, tmp_path, capsys, monkeypatch):
    """The doctor is another test's: kernels in simulators would take it most of a minute."""
    examined = []
    monkeypatch.setattr(script, "run_doctor", lambda model, **how: examined.append(how) or SimpleNamespace(certified=True))
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["bench_kernels", "--interpret", "--repeats", "1", "--json", str(out)])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # the library's attention needs both
        script.main()
    result = json.loads(out.read_text())
    assert result["certified"]
    (how,) = examined
    assert how["schedule"].numerics.implementation == "pallas_tpu"
    assert result["schedule"]["numerics"]["implementation"] == "pallas_tpu"
    against = {row["what"].split(",")[0]: row["measure"] for row in result["rows"]}
    assert against == {"attention": "copy", "product": "xla", "model": "decode step"}  # the last attention is decoding
    assert all(min(samples) > 0 for row in result["rows"] for samples in row["samples_s"].values())
    table = capsys.readouterr().out
    assert "INTERPRETED: times are void" in table
    assert table.count("\n| attention") == 5


def test_main_without_kernels_for_the_device_says_what_there_is(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_kernels"])
    monkeypatch.setattr(script, "default_schedule", lambda cfg: Schedule())
    with pytest.raises(SystemExit, match="this device has no kernels; --interpret"):
        script.main()


def test_table_gives_medians_of_ratios_within_rounds_and_the_share_of_the_bound(script, monkeypatch):
    """Rounds of 2 and 4 s, against 1 and 1 s: ratios 1/2 and 1/4, and 3 s at the device's bandwidth."""
    calls = iter([2.0, 1.0, 4.0, 1.0])
    monkeypatch.setattr(script, "sample", lambda call, number: next(calls))
    monkeypatch.setattr(script, "calls_in_a_sample", lambda call: 1)
    contest = script.Contest("x", {"kernel": lambda: None, "copy": lambda: None}, work=(300.0, 10.0), target=0.75)
    row = script.measured(contest, {"bytes_per_s": 100.0, "flop_per_s": 10.0}, repeats=2)
    assert row["ratios"] == {"kernel": 0.375}
    assert (row["measure"], row["bound"], row["floor_s"], row["of_bound"]) == ("copy", "memory", 3.0, 1.0)
