"""Training on several chips: the same bits on 1, 2, 4 and 8 of them; and how batches are cut for that.

The number of CPU devices is fixed when jax starts, so runs on several are in a process of their own, `eight_chips.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.train.data_parallel import Slice, cut, require_equal_shares, sum_over_slices
from detspec.train.experiment import load_config
from detspec.train.reasoning_loss import count
from detspec.train.run import train
from detspec.train.step import divided

CONFIG = """
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
SCRIPT = Path(__file__).with_name("eight_chips.py")


def write_config(folder: Path) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(12):
        lines = "".join(f"    if n == {j}:\n        return value_{i} + {j * i}\n\n" for j in range(12))
        (corpus / f"module_{i}.py").write_text(f"def function_{i}(n):\n{lines}")
    (folder / "config.py").write_text(f"CORPUS = {str(corpus)!r}\n{CONFIG}")
    return folder / "config.py"


@pytest.mark.parametrize(
    "arm", [pytest.param("language", marks=pytest.mark.slow), pytest.param("thinking", marks=pytest.mark.sweep)]
)
def test_weights_have_the_same_bits_on_every_number_of_chips(arm: str, tmp_path: Path):
    """Whole runs, one of them resumed on another number of chips.

    `tiny_python` itself, 200 steps: see `configs/tiny_python.py`.
    """
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # Each chip compiles its own copy of a program. jax's cache gives it to the runs that follow: 8 compilations instead of 21.
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "runs"), f"{write_config(tmp_path)}:{arm}"]
    found = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    assert len({*found["weights"], found["resumed"]}) == 1
    # The controls: with slices as large as the number of chips allows, bits do depend on it.
    assert len(set(found["a slice for each chip"])) > 1
    assert len(set(found["psum"])) > 1


def test_slices_are_added_in_pairs():
    """Float32 numbers near 1e8 are multiples of 8: a 1 is lost there, while 4 + 4 is not.

    In pairs, (1e8 + 4) + (4 + 4) and (1 + 1) + (-1e8 + 1) are 1e8 + 8 and -1e8, together 8. One after the other, the second 4
    is lost as well, and the sum is 1.
    """
    slices = [np.float32(value) for value in (1e8, 4, 4, 4, 1, 1, -1e8, 1)]
    assert sum_over_slices(jax.jit(jnp.add), jnp.float32(0), slices, chips=jax.devices()[:1]) == 8
    one_after_the_other = np.float32(0)
    for value in slices:
        one_after_the_other += value
    assert one_after_the_other == 1


@pytest.mark.parametrize(("rows", "number"), [(1, 1), (2, 2), (3, 1), (6, 2), (8, 8), (12, 4), (32, 8)])
def test_batch_is_cut_into_slices_of_equal_numbers_of_rows(rows: int, number: int):
    batch = {"tokens": np.arange(rows * 3).reshape(rows, 3), "weights": np.arange(rows)}
    slices = cut(batch, lambda batch: batch["weights"].sum())
    assert len(slices) == number
    assert {part.rows["tokens"].shape for part in slices} == {(rows // number, 3)}
    for name, leaf in batch.items():
        np.testing.assert_array_equal(np.concatenate([part.rows[name] for part in slices]), leaf)
    assert {int(part.counts) for part in slices} == {rows * (rows - 1) // 2}


def test_losses_of_slices_add_up_to_the_loss_of_the_batch(tmp_path: Path):
    """Answers have different numbers of tokens, so the mean of the slices' own means is another number."""
    experiment = load_config(f"{write_config(tmp_path)}:cot").experiment(tmp_path)
    params = experiment.init_params()
    batch = experiment.batch_at(0)
    slices = experiment.cut(batch)
    loss_fn = jax.jit(experiment.loss_fn)
    whole, metrics = loss_fn(params, Slice(batch, slices[0].counts))
    shares = [loss_fn(params, part) for part in slices]
    own_means = [float(loss_fn(params, Slice(part.rows, count(part.rows)))[0]) for part in slices]
    # Float32 sums of some hundred terms in another order: a few units in the last place, each 6e-8.
    np.testing.assert_allclose(np.sum([float(loss) for loss, _ in shares]), whole, rtol=1e-6)
    assert abs(np.mean(own_means) - float(whole)) > 1e-5 * float(whole)
    assert (
        divided(metrics)["answers"]
        == divided(jax.tree.map(lambda *parts: sum(parts), *[part for _, part in shares]))["answers"]
    )


def test_number_of_chips_that_cannot_share_is_refused():
    with pytest.raises(InputError, match=r"first batch has 8 slices, which 3 chips cannot share: .* are 1, 2, 4, 8;"):
        require_equal_shares(3, 8)
    require_equal_shares(4, 8)


def test_chips_that_are_not_there_are_refused(tmp_path: Path):
    there = len(jax.local_devices())
    config = f"{write_config(tmp_path)}:cot"
    for chips, message in ((0, "chips must be a positive integer, got 0"), (there + 1, f"but jax has {there} ")):
        with pytest.raises(InputError, match=message):
            train(config, workdir=tmp_path / "run", chips=chips)
