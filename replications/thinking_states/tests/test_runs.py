"""The trainings of the replication: every name makes a run that its problems fit, and every measurement finds its models."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from detspec.errors import InputError
from detspec.model.params import num_params
from detspec.train.config import load_config
from detspec.train.problems.task import tokenizer_of
from replications.thinking_states.measure import CONFIG, MEASUREMENTS, ROOT, all_runs
from replications.thinking_states.runs import QUICK, get_config, trainings
from replications.thinking_states.tables import document


def test_config_file_is_found_by_the_installed_command(tmp_path):
    """Which does not search the current folder: `-P` leaves it out here too."""
    code = f"from detspec.train.config import load_config; print(load_config({str(ROOT / CONFIG)!r} + ':loop-2').seed)"
    path = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "")}
    (tmp_path / "detspec").symlink_to(ROOT / "detspec")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=path, cwd=tmp_path, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_largest_model_is_small():
    assert max(4 * num_params(config.model(tokenizer_of(config.task))) for config in trainings().values()) <= 3e6


@pytest.mark.parametrize("name", trainings())
def test_longest_problems_fit_their_rows_and_thoughts(name: str, tmp_path):
    for config in (get_config(name), get_config(f"{QUICK}{name}")):
        experiment = config.experiment(tmp_path)
        for step in range(8):
            batch = experiment.batch_at(step)
            assert batch.tokens.shape == (config.batch_size, config.seq_len + 1)
    longest = config.task.draw(np.random.default_rng(0), get_config(name).max_ops)
    assert longest.steps


def test_config_file_gives_the_same_runs_and_names_those_there_are(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_config(f"{CONFIG}:loop-2") == trainings()["loop-2"]
    with pytest.raises(InputError, match="no run 'loop-9'; there are parity-thinking-0, "):
        get_config("loop-9")


def test_runs_come_after_those_they_need_and_timed_ones_last():
    for quick in (False, True):
        runs = all_runs(quick=quick)
        names = [run.name for run in runs]
        assert all(names.index(needed) < names.index(run.name) for run in runs for needed in run.needs)
        assert [run.alone for run in runs] == sorted(run.alone for run in runs)
    assert set(names) >= set(MEASUREMENTS)


def test_chosen_runs_bring_what_they_need_and_unknown_ones_are_refused():
    assert [run.name for run in all_runs(quick=False, only=["forced"])] == ["parity-thinking-0", "forced"]
    with pytest.raises(InputError, match="no run nothing; there are parity-thinking-0, "):
        all_runs(quick=True, only=["nothing"])


def test_document_shows_figures_of_every_kind_of_run():
    mark = {"device_kind": "abacus", "jax": "1", "jaxlib": "2", "detspec": "3"}
    common = {"seconds": 60.0, "cpu_seconds": 50.0, "fingerprint": mark}
    config = json.loads(json.dumps({"num_steps": 7, "max_ops": 10, "eval_problems": 64, "thinking": {"max_thought": 4}}))
    trained = {**common, "config": config, "training_cpu_seconds": 40.0, "loss": 0.25, "command": "train it"}
    runs = {
        "parity-cot-0": {**trained, "accuracy": {"10": 0.5, "20": 0.25}},
        "chunk-4": {**trained, "accuracy": {"10": 0.75}},
        "two_hop-cot-0": {**trained, "accuracy": {"1": 1.0, "2": 0.125}},
        "forced": {
            **common,
            "models": ["parity-thinking-0"],
            "found": [{"num_ops": 10, "problems": 128, "right": 1.0, "flipped": 0.984375, "flipped_by_own": 0.0}],
        },
    }
    text = document({"runs": runs, "cores": 2, "seconds": 180.0})
    assert "| parity-cot-0 | 7 | 40 | 50 | 25 | 37.5 |" in text
    assert "not learnt in distribution: parity-cot-0." in text
    assert "| 4 | 4 | 0.250 | 40 | 75 |" in text
    assert "| 10 | 128 | 100 | 98.4 | 0 |" in text
    assert "abacus, 2 cores" in text
    assert "add up to 3.0 minutes" in text
    assert "train it" in text
    assert "## Two-hop questions" in text
    assert "a tenth of these questions were held out" in text
    assert "| two_hop-cot-0 | 7 | 40 | 100 | 12.5 | 56.2 |" in text
