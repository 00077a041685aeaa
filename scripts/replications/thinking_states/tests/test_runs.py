"""The trainings of the replication: every name makes a run that its problems fit, and every measurement finds its models."""

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from detspec.checkpoint.orbax_folder import save_orbax
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.dense import with_fields
from detspec.model.params import Params, num_params, param_shapes
from detspec.train.experiment import load_config
from detspec.train.problems.tasks import tokenizer_of
from detspec.train.reasoning import ReasoningConfig
from scripts.replications.thinking_states.comparison import comparison
from scripts.replications.thinking_states.curriculum import CurriculumConfig
from scripts.replications.thinking_states.measure import CONFIG, MEASUREMENTS, ROOT, all_runs
from scripts.replications.thinking_states.runs import Training, get_config, started, starts_from, trainings
from scripts.replications.thinking_states.tables import document


def test_config_file_is_found_by_the_installed_command(tmp_path):
    """Which does not search the current folder: `-P` leaves it out here too."""
    code = f"from detspec.train.experiment import load_config; print(load_config({str(ROOT / CONFIG)!r} + ':chunk-2').seed)"
    path = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "")}
    (tmp_path / "detspec").symlink_to(ROOT / "detspec")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=path, cwd=tmp_path, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def base_of(config: Training) -> ReasoningConfig:
    """Common fields of a run that takes a chain away and one that writes it."""
    return config.base if isinstance(config, CurriculumConfig) else config


def untrained(cfg: ModelConfig) -> Params:
    """Weights that are all zero."""
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), param_shapes(cfg))


def test_largest_model_is_small():
    bases = map(base_of, trainings().values())
    assert max(4 * num_params(base.model(tokenizer_of(base.task))) for base in bases) <= 3e6


@pytest.mark.parametrize("name", trainings())
def test_longest_problems_fit_their_rows_and_thoughts(name: str, tmp_path):
    config = trainings()[name]
    base = base_of(config)
    if isinstance(config, CurriculumConfig):
        cfg = base.model(tokenizer_of(base.task))
        save_orbax(tmp_path / "chain", cfg, untrained(cfg)).result()
        config = started(config, tmp_path / "chain")
    experiment = config.experiment(tmp_path)
    for step in range(8):
        rows = jax.tree.leaves(experiment.batch_at(step))[0]
        assert rows.shape == (base.batch_size, base.seq_len + isinstance(config, ReasoningConfig))
    assert base.task.draw(np.random.default_rng(0), base.max_ops).steps


def test_runs_that_go_on_from_others_ask_for_their_models(tmp_path):
    assert starts_from("parity-coconut-0") == starts_from("parity-icot-0") == "parity-cot-0"
    assert starts_from("known-coconut2-1") == "known-cot-1"
    assert starts_from("known-cot-0") == "two_hop-facts-0"
    assert starts_from("parity40-cot-2") == "parity20-cot-2"
    assert starts_from("variables40-thinking-0") == "variables20-thinking-0"
    assert starts_from("two_hop-cot-0") is starts_from("parity40-thinking-0") is None
    assert starts_from("loop-2") == "two_hop-facts-0"
    cfg = with_fields(base_of(trainings()["two_hop-facts-0"]).backbone_cfg, num_layers=1)
    save_orbax(tmp_path / "two_hop-facts-0" / "export", cfg, untrained(cfg)).result()
    config = get_config("known-cot-0", tmp_path)
    assert base_of(config).backbone_cfg.num_layers == 1
    with pytest.raises(InputError, match="parity-cot-0/export: no such folder"):
        get_config("parity-coconut-0", tmp_path)


def test_stages_end_half_way_through_a_run():
    for config in trainings().values():
        if isinstance(config, CurriculumConfig):
            assert config.stage(0) == 1
            assert config.stage(config.base.num_steps // 2) >= config.base.max_ops


def test_config_file_gives_the_same_runs_and_names_those_there_are(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_config(f"{CONFIG}:chunk-2") == trainings()["chunk-2"]
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


def test_chains_of_runs_bring_all_that_they_go_on_from():
    names = [run.name for run in all_runs(quick=False, only=["known-coconut-0"])]
    assert names == ["two_hop-facts-0", "known-cot-0", "known-coconut-0"]


MARK = {"device_kind": "abacus", "jax": "1", "jaxlib": "2", "detspec": "3"}
COMMON = {"seconds": 60.0, "cpu_seconds": 50.0, "fingerprint": MARK}


def run_of(accuracy: dict[str, float], **other: Any) -> dict[str, Any]:
    """A result as a training leaves it."""
    config = {"num_steps": 7, "max_ops": 10, "eval_problems": 64, "thinking": {"max_thought": 4, "chunk": 4}}
    kept = {"training_cpu_seconds": 40.0, "loss": 0.25, "trained": 0.75, "command": "train it"}
    return {**COMMON, "config": config, **kept, "accuracy": accuracy, **other}


def test_document_shows_figures_of_every_kind_of_run():
    runs = {
        "parity-cot-0": run_of({"10": 0.5, "20": 0.25}),
        "two_hop-cot-0": run_of({"1": 1.0, "2": 0.125}),
        "forced": {
            **COMMON,
            "models": ["parity-thinking-0"],
            "found": [{"num_ops": 10, "problems": 128, "right": 1.0, "flipped": 0.984375, "flipped_by_own": 0.0}],
        },
    }
    text = document({"runs": runs, "cores": 2, "cpu_seconds": 180.0})
    assert "| parity-cot-0 | 7 | 0.250 | 75 | 40 | 50 | 25 |" in text
    assert "Below 95 % at 10 operations: parity-cot-0." in text
    assert "| 10 | 128 | 100 | 98.4 | 0 |" in text
    assert "abacus, 2 cores" in text
    assert "took 3 minutes of processor time" in text
    assert "train it" in text
    assert "a tenth of these questions were held out" in text
    assert "| two_hop-cot-0 | 7 | 0.250 | 75 | 40 | 100 | 12.5 |" in text


def test_comparison_puts_the_papers_numbers_next_to_means_over_seeds_and_times():
    runs = {
        "parity-cot-0": run_of({"10": 0.5, "20": 0.25}),
        "parity-cot-1": run_of({"10": 1.0, "20": 0.75}),
        "parity20-cot-0": run_of({"10": 1.0, "20": 0.5, "40": 0.25}),
        "arithmetic-cot-0": run_of({"8": 1.0, "16": 0.5}),
        "arithmetic-coconut-0": run_of({"8": 0.5}, starts_from="arithmetic-cot-0"),
        "arithmetic-thinking-0": run_of({"8": 1.0, "16": 0.25}),
        "chunk-2": run_of({"8": 0.75, "16": 0.5}),
        "speeds": {
            **COMMON,
            "models": ["arithmetic-cot-0", "arithmetic-thinking-0", "chunk-2"],
            "settings": {"arms": ["cot", "thinking", "thinking"]},
            "found": [{"ms": 8.0, "speedup": 1.0}, {"ms": 4.0, "speedup": 2.0}, {"ms": 10.0, "speedup": 0.8}],
        },
        "last-thinking-0": run_of({"5": 0.5}),
        "first-thinking-0": run_of({"5": 0.75}),
    }
    text = comparison(runs)
    # N = 10: the means of 0.5, 0.25 and of 1, 0.75. N = 20: over 20 and 40 alone.
    assert "| parity, chain of thought | 12.3 | 62.5 (37.5 to 87.5) | 38.1 | 37.5 | 64.4 | - |" in text
    assert "| GSM / arithmetic, chain of thought | 60.5 | 1.00 | 100 | 1.00 | 75 | 7 | 0.250 |" in text
    assert "| GSM / arithmetic, Coconut | 32.6 | 3.14 | 50 | - | 75 | 7 + 7 | 0.250 |" in text
    assert "| GSM / arithmetic, Thinking States | 42.2 | 2.66 | 100 | 2.00 | 75 | 7 | 0.250 |" in text
    assert "| 2 | 75 | 50 | 10.0 | 0.80 | 7 | 0.250 |" in text
    assert "| 4 | 100 | 25 | 4.0 | 2.00 | 7 | 0.250 |" in text
    assert "| question first | 48.65 | 75 | 7 | 0.250 |" in text
    assert "| chunks of 48 tokens | " in text
