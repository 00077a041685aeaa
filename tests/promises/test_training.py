"""Training ends with the same bits whether it was killed and resumed or not, and on any number of chips.

The controls forget one thing at a resume: the moments of the optimiser, or how many batches were read. And they add gradients
as is usual: each chip has one slice, however many chips there are.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from detspec.checkpoint.store import Store
from detspec.train.experiment import load_config
from detspec.train.run import run_experiment, train
from detspec.train.step import TrainState
from tests.train.small_runs import (
    final_bits,
    left_alone,
    run_until_killed,
    timeless_log,
    write_config,
    write_corpus,
    write_sliced_config,
)


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    return write_config(root / "config.py", write_corpus(root / "corpus"))


@pytest.fixture(scope="module")
def finished(config_path: Path) -> Path:
    return left_alone(config_path)


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


@pytest.fixture(scope="module")
def broken_off(config_path: Path) -> Path:
    """The workdir of a run that ended before step 8; its last checkpoint is at step 6."""
    workdir = config_path.parent / "broken_off"
    workdir.mkdir()
    experiment = load_config(config_path).experiment(workdir)

    def batch_at(step: int) -> Any:
        if step == 7:
            raise KeyboardInterrupt
        return experiment.batch_at(step)

    with pytest.raises(KeyboardInterrupt):
        run_experiment(dataclasses.replace(experiment, batch_at=batch_at), workdir=workdir, progress=False)
    return workdir


def resumed(broken_off: Path, workdir: Path, config_path: Path, num_repeated: int = 0) -> Path:
    """The workdir of a copy of the broken run that goes on, and reads so many batches again."""
    shutil.copytree(broken_off, workdir)
    experiment = load_config(config_path).experiment(workdir)
    repeating = dataclasses.replace(experiment, batch_at=lambda step: experiment.batch_at(max(0, step - num_repeated)))
    run_experiment(repeating, workdir=workdir, progress=False)
    return workdir


def test_run_that_is_broken_off_and_resumed_ends_with_the_same_bits(broken_off, finished, config_path, tmp_path):
    workdir = resumed(broken_off, tmp_path / "run", config_path)
    assert final_bits(workdir, config_path) == final_bits(finished, config_path)


def test_control_resumed_run_that_reads_a_batch_twice_ends_with_other_bits(broken_off, finished, config_path, tmp_path):
    workdir = resumed(broken_off, tmp_path / "run", config_path, num_repeated=1)
    assert final_bits(workdir, config_path) != final_bits(finished, config_path)


def test_control_resumed_run_that_forgets_the_moments_ends_with_other_bits(broken_off, finished, config_path, tmp_path):
    restore = Store.restore

    def forgetful(self: Store, step: int, like: TrainState) -> TrainState:
        state = restore(self, step, like)
        return state.replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "restore", forgetful)
        workdir = resumed(broken_off, tmp_path / "run", config_path)
    assert final_bits(workdir, config_path) != final_bits(finished, config_path)


# The number of CPU devices is fixed when jax starts, so runs on several chips are in a process of their own.
SCRIPT = Path(__file__).parents[1] / "train" / "eight_chips.py"


@pytest.fixture(
    scope="module", params=[pytest.param("language", marks=pytest.mark.slow), pytest.param("thinking", marks=pytest.mark.sweep)]
)
def on_chips(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Digests of whole runs on 1, 2, 4 and 8 chips, one of them resumed on another number, and of the controls.

    `tiny_python` itself, 200 steps: see `configs/tiny_python.py`.
    """
    folder = tmp_path_factory.mktemp("chips")
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # Each chip compiles its own copy of a program. jax's cache gives it to the runs that follow: 8 compilations instead of 21.
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, str(SCRIPT), str(folder / "runs"), f"{write_sliced_config(folder)}:{request.param}"]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def test_weights_have_the_same_bits_on_every_number_of_chips(on_chips):
    assert len({*on_chips["weights"], on_chips["resumed"]}) == 1


def test_control_gradients_in_a_slice_for_each_chip_depend_on_their_number(on_chips):
    assert len(set(on_chips["a slice for each chip"])) > 1
    assert len(set(on_chips["psum"])) > 1
