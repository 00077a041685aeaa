"""Whole runs: their log, their export, and workdirs that hold a run already."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from detspec.checkpoint.hf import load_hf
from detspec.checkpoint.load import cast_params, load
from detspec.errors import InputError
from detspec.train.experiment import load_config
from detspec.train.run import train
from tests.train.small_runs import final_state, left_alone, timeless_log, write_config, write_corpus


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    return write_config(root / "config.py", write_corpus(root / "corpus"))


@pytest.fixture(scope="module")
def finished(config_path: Path) -> Path:
    return left_alone(config_path)


def test_resuming_a_finished_run_changes_nothing(config_path: Path, finished: Path):
    before = timeless_log(finished), (finished / "export" / "model.safetensors").read_bytes()
    train(config_path, workdir=finished, progress=False)
    assert (timeless_log(finished), (finished / "export" / "model.safetensors").read_bytes()) == before


def test_log_cut_in_the_middle_of_a_line_is_continued(config_path: Path, finished: Path):
    before = timeless_log(finished)
    with (finished / "log.jsonl").open("a") as log:
        log.write('{"step": 15, "lo')
    train(config_path, workdir=finished, progress=False)
    assert timeless_log(finished) == before


def test_log_holds_every_step_and_the_evaluations(finished: Path):
    log = timeless_log(finished)
    assert [line["step"] for line in log if "loss" in line] == list(range(1, 15))
    assert [line["step"] for line in log if "heldout_loss" in line] == [3, 6, 9, 12]
    assert log[-1]["final"]["heldout_loss"] < log[0]["loss"]


def test_export_is_the_final_state_in_bfloat16(config_path: Path, finished: Path):
    cfg, params = cast_params(load_config(config_path).model, final_state(finished, config_path).params, "bfloat16")
    loaded_cfg, loaded = load_hf(finished / "export")
    assert loaded_cfg == cfg
    for leaf, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()
    model = load(finished / "export")
    assert model.eos_ids == (0,)
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("def f(n):\n    return n\n")) == "def f(n):\n    return n\n"
    assert {path.name for path in (finished / "export").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((finished / "export" / "config.json").read_text())["model_type"] == "llama"


def test_workdir_of_another_run_is_refused(config_path: Path, finished: Path, tmp_path: Path):
    with pytest.raises(InputError, match="already holds a run"):
        train(config_path, workdir=finished, resume=False, progress=False)
    other = write_config(tmp_path / "config.py", config_path.parent / "corpus", seed=1, peak_lr=1e-3)
    with pytest.raises(InputError, match=r"differing: config\.optimizer\.peak_lr, config\.seed; give it"):
        train(other, workdir=finished, progress=False)
    changed = config_path.parent / "corpus" / "module_0.py"
    source = changed.read_text()
    changed.write_text(source + "pass\n")
    with pytest.raises(InputError, match="another config or data; differing: corpus; give it"):
        train(config_path, workdir=finished, progress=False)
    changed.write_text(source)
