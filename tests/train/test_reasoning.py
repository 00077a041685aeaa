"""Runs of models that reason: they learn, go on where they were killed with the same bits, and export what `load` takes."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from detspec.checkpoint.load import load
from detspec.train.experiment import load_config
from detspec.train.run import read_log, train
from tests.train.small_runs import run_until_killed

pytestmark = pytest.mark.slow

CONFIG = """
from detspec.config import ModelConfig, ThinkingConfig
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.tasks import Parity
from detspec.train.reasoning import ReasoningConfig
from detspec.model.dense import dense_config

def get_config(arm="thinking"):
    return ReasoningConfig(
        backbone=dense_config(
            vocab_size=60, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=24,
            tie_embeddings=True, max_position=128, dtype="float32",
        ),
        thinking=ThinkingConfig(chunk=8, in_layer=0, out_layer=1, max_thought=4, end_id=0),
        task=Parity(), arm=arm, max_ops=3, seq_len=48, num_steps=10, batch_size=8,
        optimizer=OptimizerConfig(peak_lr=1e-2, final_lr=1e-3, warmup_steps=2),
        eval_ops=(2,), eval_problems=2, eval_every=4, checkpoint_every=2,
    )
"""


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reasoning") / "config.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def finished(config_path: Path) -> Path:
    """Workdir of a run that was left alone."""
    workdir = config_path.parent / "finished"
    train(config_path, workdir=workdir, progress=False)
    return workdir


def weights(workdir: Path) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(load(workdir / "export").params)]


def timeless_log(workdir: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "tok_per_s"} for line in read_log(workdir / "log.jsonl")]


def test_loss_and_the_thoughts_part_of_it_fall(finished: Path):
    log = timeless_log(finished)
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    for name in ("loss", "thought_loss"):
        assert np.mean([line[name] for line in steps[-3:]]) < 0.9 * np.mean([line[name] for line in steps[:3]])
    assert all(0 <= line["thoughts"] <= 1 and 0 <= line["answers"] <= 1 for line in steps)
    assert [line["step"] for line in log if "heldout_thought_loss" in line] == [4, 8]


def test_killed_and_resumed_run_ends_with_the_same_bits(config_path: Path, finished: Path, tmp_path: Path):
    run_until_killed(config_path, tmp_path, after_line=4)  # a checkpoint is at step 2
    assert not (tmp_path / "accuracy.json").exists()
    train(config_path, workdir=tmp_path, progress=False)
    assert weights(tmp_path) == weights(finished)
    assert timeless_log(tmp_path) == timeless_log(finished)


def test_export_thinks_and_has_the_words_and_the_end_of_its_task(finished: Path):
    model = load(finished / "export")
    assert model.cfg.thinking.chunk == 8
    assert set(model.params["thinking"]) == {"thinker", "compressor"}
    trained = model.params["thinking"]["compressor"]["layer"]["q"]
    assert (trained != model.params["layers"][0]["q"]).any()  # it began as a copy
    assert model.eos_ids == (0,)
    text = "A coin's state is heads. Alice flips"
    assert model.decode(model.tokenizer.encode(text)) == text


def test_final_evaluation_writes_accuracy_and_its_drawing(finished: Path):
    accuracy = json.loads((finished / "accuracy.json").read_text())
    assert (accuracy["arm"], accuracy["max_ops"], list(accuracy["accuracy"])) == ("thinking", 3, ["2"])
    assert all(value in (0, 0.5, 1) for value in accuracy["accuracy"].values())
    final = read_log(finished / "log.jsonl")[-1]["final"]
    assert final == {f"accuracy at {n}": value for n, value in accuracy["accuracy"].items()}
    assert (finished / "accuracy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arm", ["cot", "no_cot"])
def test_other_arms_train_the_backbone_alone(arm: str, config_path: Path, tmp_path: Path):
    experiment = load_config(f"{config_path}:{arm}").experiment(tmp_path)
    params, batch = experiment.init_params(), experiment.batch_at(0)
    assert "thinking" not in params
    assert batch.thoughts.shape[1] == 0
    loss, metrics = jax.jit(experiment.loss_fn)(params, experiment.cut(batch)[0])
    assert np.isfinite(loss)
    assert set(metrics) == {"answers"}
    continuation = {"cot": 3, "no_cot": 2}[arm]  # the answer and the end; before them at least one step
    assert batch.weights.sum(1).min() >= continuation
