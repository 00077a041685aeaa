"""Runs of models that reason: what no run can come to a good end with is refused before its first step."""

import dataclasses
import sys
from pathlib import Path

import pytest

from detspec.config import ThinkingConfig
from detspec.errors import InputError
from detspec.model.dense import dense_config
from detspec.train import reasoning
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.tasks import Parity
from detspec.train.problems.two_hop import TwoHop
from detspec.train.reasoning import ReasoningConfig

THINKING = ThinkingConfig(chunk=8, in_layer=1, out_layer=2, max_thought=4, end_id=0)
CONFIG = ReasoningConfig(
    backbone=dense_config(*(60, 16, 2, 2, 1, 8, 24), max_position=128, dtype="float32"),
    thinking=THINKING,
    task=Parity(),
    arm="thinking",
    max_ops=2,
    seq_len=48,
    num_steps=10,
    batch_size=8,
    optimizer=OptimizerConfig(peak_lr=1e-2, final_lr=1e-3, warmup_steps=2),
    eval_ops=(1, 2),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": 0.0}, r"seed must be an integer of at least 0, got 0\.0"),
        ({"seed": False}, "seed must be an integer of at least 0, got False"),
        ({"backbone": 3}, "backbone must be a ModelConfig or the path of a model folder, got 3"),
    ],
)
def test_values_that_no_run_can_have_are_refused(changes: dict, message: str):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_problems_of_the_evaluation_that_are_longer_than_the_positions_are_refused(tmp_path: Path):
    longer = dataclasses.replace(CONFIG, eval_ops=(1, 40))
    with pytest.raises(InputError, match=r"a problem of 40 operations takes 1\d\d tokens, but the backbone has 128 positions"):
        longer.experiment(tmp_path)


@pytest.mark.parametrize("changes", [{"eval_ops": (1, 5)}, {"eval_ops": (1,), "max_ops": 5}])
def test_numbers_of_operations_that_the_task_does_not_draw_are_refused(changes: dict, tmp_path: Path):
    dataclasses.replace(CONFIG, task=TwoHop()).experiment(tmp_path)
    with pytest.raises(InputError, match="draws problems of 1 or 2 hops, got 5"):
        dataclasses.replace(CONFIG, task=TwoHop(), **changes).experiment(tmp_path)


def test_chunk_that_the_evaluation_cannot_read_is_refused_in_the_arm_that_thinks(tmp_path: Path):
    config = dataclasses.replace(CONFIG, thinking=dataclasses.replace(THINKING, chunk=64))
    with pytest.raises(InputError, match="a chunk of 64 tokens and a thought of up to 4 do not fit a page of 64 slots"):
        config.experiment(tmp_path)
    dataclasses.replace(config, arm="cot").experiment(tmp_path)


def test_config_without_thinking_is_refused_in_every_arm():
    for arm in ("thinking", "cot"):
        with pytest.raises(InputError, match="thinking must be a ThinkingConfig in every arm, got None"):
            dataclasses.replace(CONFIG, thinking=None, arm=arm)


def test_run_without_matplotlib_ends_with_its_accuracy_and_says_that_there_is_no_picture(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(reasoning, "accuracy_by_operations", lambda *given, **settings: {1: 0.5})
    experiment = dataclasses.replace(CONFIG, arm="no_cot").experiment(tmp_path)
    result = experiment.finish(experiment.init_params())
    assert result.metrics == {"accuracy at 1": 0.5}
    assert not (tmp_path / "accuracy.png").exists()
    assert "no picture of the accuracy: pictures need matplotlib" in capsys.readouterr().err
