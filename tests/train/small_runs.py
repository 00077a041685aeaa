"""Small trainings, ended early by a signal or left alone, and what is compared of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from detspec.checkpoint.store import Store
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

# Batches of several slices, for several chips: of a language, and of tasks to reason on.
SLICED = """
from detspec.config import ModelConfig, ThinkingConfig
from detspec.train.batches import Phase
from detspec.train.language import LanguageConfig
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.tasks import Parity
from detspec.train.reasoning import ReasoningConfig
from detspec.model.dense import dense_config

MODEL = dict(
    vocab_size=300, d_model=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, d_ff=48, tie_embeddings=True,
    max_position=64, dtype="float32",
)
OPTIMIZER = OptimizerConfig(peak_lr=3e-3, final_lr=1e-4, warmup_steps=1)

def get_config(arm):
    if arm == "language":
        return LanguageConfig(
            model=dense_config(**MODEL), corpus=CORPUS, holdout_one_in=3, optimizer=OPTIMIZER, checkpoint_every=2,
            phases=(Phase(num_steps=4, batch_size=8, seq_len=32), Phase(num_steps=1, batch_size=2, seq_len=48)),
        )
    return ReasoningConfig(
        backbone=dense_config(**MODEL), thinking=ThinkingConfig(chunk=8, in_layer=0, out_layer=1, max_thought=4, end_id=0),
        task=Parity(), arm=arm, max_ops=3, seq_len=48, num_steps=5, batch_size=16, optimizer=OPTIMIZER, checkpoint_every=2,
        eval_ops=(2,),
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


def write_corpus(root: Path) -> Path:
    root.mkdir()
    for i in range(12):
        lines = "".join(f"    if n == {j}:\n        return value_{i} + {j * i}\n\n" for j in range(12))
        (root / f"module_{i}.py").write_text(f"def function_{i}(n):\n{lines}")
    return root


def write_config(path: Path, corpus: Path, seed: int = 0, peak_lr: float = 3e-3) -> Path:
    path.write_text(CONFIG.format(corpus=str(corpus), seed=seed, peak_lr=peak_lr))
    return path


def write_sliced_config(folder: Path) -> Path:
    """Writes a config of the arms of `SLICED` and its corpus."""
    corpus = write_corpus(folder / "corpus")
    (folder / "config.py").write_text(f"CORPUS = {str(corpus)!r}\n{SLICED}")
    return folder / "config.py"


def left_alone(config_path: Path) -> Path:
    """The workdir of a whole run."""
    workdir = config_path.parent / "finished"
    result = train(config_path, workdir=workdir, progress=False)
    assert result.metrics["train_tokens"] == 8 * 4 * 16 + 6 * 2 * 32
    assert result.export == workdir / "export"
    assert read_log(workdir / "log.jsonl")[-1] == {"step": 14, "final": result.metrics}
    return workdir


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
