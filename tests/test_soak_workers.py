"""Several workers share a job and are killed, stopped and frozen at random moments."""

import json

import pytest

from scripts import soak_workers
from tests.engine.byte_model import load_folder

pytestmark = pytest.mark.slow


def test_tiny_soak_gives_the_bytes_of_one_process_and_finds_the_control(tmp_path):
    """Three workers. No verdict depends on the clock: signals come when so many lines are done."""
    load_folder(tmp_path / "model")
    sizes = ["--rounds", "1", "--workers", "3", "--kills", "3", "--frozen", "1", "--most-frozen-s", "2", "--requests", "160"]
    assert soak_workers.main(["--workdir", str(tmp_path), "--model", str(tmp_path / "model"), *sizes]) == 0
    found = json.loads((tmp_path / "soak_workers.json").read_text())
    [facts] = found["rounds"]
    assert sum(facts["signals"].values()) == 4
    assert found["same_bytes"]
    assert found["control_found"]
