"""Training configs and the files that hold them."""

import dataclasses
from pathlib import Path

import pytest

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.train.config import Phase, TrainConfig, load_config

MODEL = ModelConfig(
    vocab_size=512, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16, max_position=64, dtype="float32"
)
CONFIG = TrainConfig(model=MODEL, corpus="python_stdlib", phases=(Phase(4, 2, 8),), peak_lr=1e-3, final_lr=1e-4, warmup_steps=2)
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": ()}, "at least one phase"),
        ({"phases": (Phase(1, 1, 65),)}, "seq_len 65 exceeds model.max_position 64"),
        ({"model": dataclasses.replace(MODEL, dtype="bfloat16")}, "got 'bfloat16'"),
        ({"warmup_steps": 4}, r"warmup_steps must lie in \[0, 4\), got 4"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a positive integer, got 0"),
        ({"eval_tokens": 1.5}, "eval_tokens must be a positive integer, got 1.5"),
    ],
)
def test_bad_config_is_refused(changes, message: str):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_bad_phase_is_refused():
    with pytest.raises(InputError, match=r"Phase\.batch_size must be a positive integer, got 0"):
        Phase(num_steps=1, batch_size=0, seq_len=8)


@pytest.mark.parametrize(
    ("source", "message"),
    [("x = 1\n", "defines no get_config"), ("def get_config():\n    return 3\n", "must return a TrainConfig, got int")],
)
def test_config_file_without_a_config_is_refused(tmp_path: Path, source: str, message: str):
    (tmp_path / "config.py").write_text(source)
    with pytest.raises(InputError, match=message):
        load_config(tmp_path / "config.py")


def test_missing_config_file_is_named(tmp_path: Path):
    with pytest.raises(InputError, match="no such config file"):
        load_config(tmp_path / "config.py")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_of_the_repository_loads_and_opens_with_a_lab_note(path: Path):
    config = load_config(path)
    assert 2e6 <= config.model.num_params <= 6e6
    assert path.read_text().startswith('"""')
