"""Whole runs: killed and resumed ones end with the bits of one that was left alone."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from detspec.checkpoint.hf import load_hf
from detspec.checkpoint.load import cast_params, load
from detspec.checkpoint.store import Store
from detspec.errors import InputError
from detspec.model.params import init_params
from detspec.train.experiment import load_config
from detspec.train.optimizer import make_optimizer
from detspec.train.run import read_log, train
from detspec.train.step import TrainState, init_state

CONFIG = """
from detspec.model.dense import dense_config
from detspec.train.batches import Phase
from detspec.train.language import LanguageConfig
from detspec.train.optimizer import OptimizerConfig

def get_config():
    return LanguageConfig(
        model=dense_config(
            vocab_size=300, d_model=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, d_ff=48,
            tie_embeddings=True, max_position=64, dtype="float32",
        ),
        corpus={corpus!r}, holdout_one_in=3, seed={seed},
        phases=(Phase(num_steps=8, batch_size=4, seq_len=16), Phase(num_steps=6, batch_size=2, seq_len=32)),
        optimizer=OptimizerConfig(peak_lr={peak_lr}, final_lr=1e-4, warmup_steps=2),
        eval_every=3, eval_tokens=64, checkpoint_every=3,
    )
"""
RUN = """
import os, signal, sys
from detspec.train.run import Log, train

append, num_lines = Log.append, 0

def append_and_end(log, line):
    global num_lines
    append(log, line)
    num_lines += 1
    if num_lines == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

Log.append = append_and_end
train(sys.argv[1], workdir=sys.argv[2], progress=False)
"""


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    return write_config(root / "config.py", write_corpus(root / "corpus"))


@pytest.fixture(scope="module")
def finished(config_path: Path) -> Path:
    """Workdir of a run left alone."""
    workdir = config_path.parent / "finished"
    result = train(config_path, workdir=workdir, progress=False)
    assert result.metrics["train_tokens"] == 8 * 4 * 16 + 6 * 2 * 32
    assert result.export == workdir / "export"
    assert read_log(workdir / "log.jsonl")[-1] == {"step": 14, "final": result.metrics}
    return workdir


def write_corpus(root: Path) -> Path:
    root.mkdir()
    for i in range(12):
        lines = "".join(f"    if n == {j}:\n        return value_{i} + {j * i}\n\n" for j in range(12))
        (root / f"module_{i}.py").write_text(f"def function_{i}(n):\n{lines}")
    return root


def write_config(path: Path, corpus: Path, seed: int = 0, peak_lr: float = 3e-3) -> Path:
    path.write_text(CONFIG.format(corpus=str(corpus), seed=seed, peak_lr=peak_lr))
    return path


def final_state(workdir: Path, config_path: Path) -> TrainState:
    config = load_config(config_path)
    optimizer = make_optimizer(config.optimizer, config.num_steps)
    like = jax.eval_shape(lambda: init_state(init_params(config.model, jax.random.key(0)), optimizer))
    with Store(workdir / "checkpoints") as store:
        return store.restore(14, like)


def final_bits(workdir: Path, config_path: Path) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(final_state(workdir, config_path))]


def timeless_log(workdir: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "tok_per_s"} for line in read_log(workdir / "log.jsonl")]


def run_until_killed(config_path: Path, workdir: Path, after_line: int) -> None:
    """Runs in a process of its own, which is killed when it has written line `after_line` of its log."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", RUN, str(config_path), str(workdir), str(after_line)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert len(read_log(workdir / "log.jsonl")) == after_line


def test_killed_and_resumed_run_ends_with_the_same_bits(config_path: Path, finished: Path, tmp_path: Path):
    run_until_killed(config_path, tmp_path / "run", after_line=7)  # steps 1 to 5 and the evaluation at 3
    with Store(tmp_path / "run" / "checkpoints") as store:
        killed_at = store.latest_step()
    assert killed_at is not None
    assert killed_at < 14
    train(config_path, workdir=tmp_path / "run", progress=False)
    assert final_bits(tmp_path / "run", config_path) == final_bits(finished, config_path)
    assert timeless_log(tmp_path / "run") == timeless_log(finished)
    weights = [(workdir / "export" / "model.safetensors").read_bytes() for workdir in (tmp_path / "run", finished)]
    assert weights[0] == weights[1]


def test_another_seed_ends_with_other_bits(config_path: Path, finished: Path, tmp_path: Path):
    other = write_config(tmp_path / "config.py", config_path.parent / "corpus", seed=1)
    train(other, workdir=tmp_path / "run", progress=False)
    assert final_bits(tmp_path / "run", config_path) != final_bits(finished, config_path)


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
