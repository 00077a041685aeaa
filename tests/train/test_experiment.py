"""The loop with a kind of run it has never heard of: a point that is drawn to goals."""

import re
from pathlib import Path

import numpy as np
import pytest

from detspec import progress
from detspec.checkpoint.store import Store
from detspec.errors import InputError
from detspec.train.run import read_log, train

CONFIG = """
import dataclasses
import jax.numpy as jnp
import numpy as np
from detspec.train.experiment import Experiment, Result
from detspec.train.optimizer import OptimizerConfig

def loss_fn(params, batch):
    off = params["at"] - batch["goal"] * batch["scale"]
    return (off * off).mean(), {{"accuracy": (jnp.abs(off) < 1).mean(dtype=jnp.float32), "worst": jnp.abs(off).max()}}

@dataclasses.dataclass(frozen=True)
class PointConfig:
    seed: int
    optimizer: OptimizerConfig = OptimizerConfig(peak_lr=0.3, final_lr=0.1, warmup_steps=1)

    def experiment(self, workdir):
        def batch_at(step):
            if step == {break_at}:
                raise KeyboardInterrupt
            goal = np.random.default_rng((self.seed, step)).normal(size=3).astype(np.float32)
            return {{"goal": goal, "scale": np.float32(0.5)}}

        def finish(params):
            np.save(workdir / "point.npy", params["at"])
            return Result({{"norm": float(jnp.linalg.norm(params["at"]))}}, workdir / "point.npy")

        return Experiment(
            num_steps=10, eval_every=4, checkpoint_every=3, optimizer=self.optimizer, record=dataclasses.asdict(self),
            init_params=lambda: {{"at": jnp.full(3, self.seed, jnp.float32)}}, loss_fn=loss_fn, batch_at=batch_at,
            tokens_at=lambda step: 3, evaluate=lambda params, step: {{"first": float(params["at"][0]), "after": step}},
            finish=finish, exports="a point of 3 numbers",
        )

def get_config(arm):
    return PointConfig(seed=int(arm))
"""


def write(folder: Path, *, break_at: int | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "point.py").write_text(CONFIG.format(break_at=break_at))
    return folder / "point.py"


def timeless_log(workdir: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "tok_per_s"} for line in read_log(workdir / "log.jsonl")]


def test_metrics_of_loss_evaluation_and_end_land_in_the_log(tmp_path: Path):
    result = train(f"{write(tmp_path)}:7", workdir=tmp_path / "run", progress=True)
    log = read_log(tmp_path / "run" / "log.jsonl")
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert all(list(line) == ["step", "loss", "accuracy", "worst", "lr", "grad_norm", "tok_per_s"] for line in steps)
    off = np.float32(7) - np.random.default_rng((7, 0)).normal(size=3).astype(np.float32) / 2
    assert (steps[0]["accuracy"], steps[0]["worst"]) == (0.0, np.abs(off).max())
    assert [(line["step"], line["after"]) for line in log if "first" in line] == [(4, 3), (8, 7)]
    assert log[-1] == {"step": 10, "final": result.metrics}
    assert result.export.is_file()


def test_run_without_a_terminal_says_what_it_exports_and_lines_of_progress(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    train(f"{write(tmp_path)}:7", workdir=tmp_path / "run")
    exports, compiling, *_, last = lines = capsys.readouterr().err.splitlines()
    assert (exports, compiling) == ("detspec: a point of 3 numbers", "detspec: compiling")
    assert last == "detspec: final evaluation and export"
    steps = [line for line in lines if " steps, " in line]
    assert [int(line.split()[1]) for line in steps] == list(range(1, 11))
    values = r"loss \d+\.\d{3}, accuracy \d\.\d{3}, worst \d+\.\d{3}"
    assert re.fullmatch(rf"detspec: 1 of 10 steps, {values}, [\d,]+ tok/s", steps[0])
    evaluated = r"first -?\d+\.\d{3}, after 3\.000"
    assert re.fullmatch(rf"detspec: 4 of 10 steps, {values}, {evaluated}, [\d,]+ tok/s, 0:00:\d\d left", steps[3])
    train(f"{write(tmp_path)}:7", workdir=tmp_path / "quiet", progress=False)
    assert capsys.readouterr().err == ""


def test_broken_off_and_resumed_run_ends_with_the_same_bits(tmp_path: Path):
    bits = {}
    for arm in ("1", "2"):
        bits[arm] = train(f"{write(tmp_path)}:{arm}", workdir=tmp_path / arm, progress=False).export.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        train(f"{write(tmp_path, break_at=7)}:1", workdir=tmp_path / "run", progress=False)
    with Store(tmp_path / "run" / "checkpoints") as store:
        assert store.latest_step() == 6
    assert [line["step"] for line in timeless_log(tmp_path / "run")][-1] == 7  # beyond the checkpoint: to be cut back
    resumed = train(f"{write(tmp_path)}:1", workdir=tmp_path / "run", progress=False).export.read_bytes()
    assert resumed == bits["1"] != bits["2"]
    assert timeless_log(tmp_path / "run") == timeless_log(tmp_path / "1") != timeless_log(tmp_path / "2")


def test_work_folder_of_another_arm_is_refused(tmp_path: Path):
    path = write(tmp_path)
    train(f"{path}:1", workdir=tmp_path / "run", progress=False)
    with pytest.raises(InputError, match=r"another config or data; differing: seed; give it"):
        train(f"{path}:2", workdir=tmp_path / "run", progress=False)
