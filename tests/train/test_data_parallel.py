"""How batches are cut for several chips, and how the gradients of the slices are added up."""

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
from tests.train.small_runs import write_sliced_config


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
    experiment = load_config(f"{write_sliced_config(tmp_path)}:cot").experiment(tmp_path)
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
    config = f"{write_sliced_config(tmp_path)}:cot"
    for chips, message in ((0, "chips must be a positive integer, got 0"), (there + 1, f"but jax has {there} ")):
        with pytest.raises(InputError, match=message):
            train(config, workdir=tmp_path / "run", chips=chips)
