"""Files that were written before stay good: later code of the same version goes on with a job, and reproduces its output.

The folder `earlier` holds a job as detspec wrote it on 2026-11-23, on a device that counts up, so that no machine matters. The
controls change what such files are recognised by: a compiler's version in the journal, a token, and the last bit of a number.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.jobs.audit import run_audit
from detspec.jobs.files import journal_path
from detspec.jobs.job import run_job
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.engine.fake_device import FAKE_MODEL, FakeDevice

EARLIER = Path(__file__).with_name("earlier")
MANIFEST = json.loads((EARLIER / "out.manifest.json").read_text())
SCHEDULE = Schedule(Numerics(page=4), Budget(8, 4))
CONFIG = EngineConfig(max_requests=3, max_len=32, method="none", schedule=SCHEDULE)
OF_AN_ENGINE = ("mesh", "model", "schedule")


def engine_of(model: Any = FAKE_MODEL, config: EngineConfig = CONFIG) -> Engine:
    return Engine.over(FakeDevice(SCHEDULE, config, model=model))


@pytest.fixture
def on_machine(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Copies the files into a folder of their own on the machine of that day, but for `changes`; returns the output's path."""

    def copied(**changes: str) -> Path:
        machine = {name: value for name, value in MANIFEST["fingerprint"].items() if name not in OF_AN_ENGINE} | changes
        monkeypatch.setattr("detspec.engine.engine.fingerprint", lambda: machine)
        monkeypatch.setattr("detspec.jobs.records.fingerprint", lambda: machine)
        monkeypatch.setattr("detspec.jobs.audit.Engine", engine_of)
        monkeypatch.chdir(tmp_path)  # the manifest names its prompts without a folder
        for path in EARLIER.iterdir():
            Path(path.name).write_bytes(path.read_bytes())
        return Path("out.jsonl")

    return copied


def resume(out: Path, num_kept: int) -> dict[str, Any]:
    """Goes on with a job whose journal has so many completions; returns its manifest."""
    out.unlink()
    out.with_name("out.manifest.json").unlink()
    whole = journal_path(out).read_bytes().splitlines(keepends=True)
    journal_path(out).write_bytes(b"".join(whole[: 1 + num_kept]))
    with Prompts("in.jsonl") as prompts:
        result = run_job(engine_of(), JobSpec(prompts, SamplingParams(max_tokens=8)), out)
    assert result.stats["num_resumed"] == num_kept
    return json.loads(out.with_name("out.manifest.json").read_text())


@pytest.mark.parametrize("num_kept", [0, 1, 5, 8])
def test_earlier_job_is_resumed_to_the_bytes_of_its_day(num_kept, on_machine):
    out = on_machine()
    manifest = resume(out, num_kept)
    assert out.read_bytes() == (EARLIER / out.name).read_bytes()
    # By now a manifest may say more, and the engine may have more settings, none of which changes a bit.
    known = MANIFEST.keys() - {"engine"}
    assert {name: manifest[name] for name in known} == {name: MANIFEST[name] for name in known}


def test_earlier_output_is_reproduced_by_an_audit(on_machine):
    report = run_audit(FAKE_MODEL, on_machine())
    assert report.reproduced
    assert (report.num_records, report.num_ordinary, report.machine) == (9, 0, [])


def test_control_earlier_job_of_another_compiler_is_refused(on_machine):
    with pytest.raises(InputError, match=r'another job: fingerprint\.jaxlib: journal has "0.10.0", this job has "0.11.0"'):
        resume(on_machine(jaxlib="0.11.0"), 5)


def set_token(record: dict[str, Any]) -> None:
    record["token_ids"][1] += 1


def set_last_bit(record: dict[str, Any]) -> None:
    record["logprobs"][1] = float(np.nextafter(np.float32(record["logprobs"][1]), np.float32(0)))


@pytest.mark.parametrize("change", [set_token, set_last_bit])
def test_control_earlier_output_with_a_change_is_not_reproduced(change, on_machine):
    out = on_machine()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    change(records[4])
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [found.position for found in run_audit(FAKE_MODEL, out).differences] == [1]
