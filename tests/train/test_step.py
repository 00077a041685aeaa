"""An optimiser step, whatever the loss: here the distance of a point from where it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.train.optimizer import OptimizerConfig, make_optimizer
from detspec.train.step import init_state, make_train_step

OPTIMIZER = make_optimizer(OptimizerConfig(peak_lr=1e-1, final_lr=1e-2, warmup_steps=5, weight_decay=0.0), 50)
GOAL = {"goal": jnp.float32([3.0, 4.0])}


def distance(params, batch):
    """Half the squared distance, whose gradient is the difference; and the largest coordinate's."""
    off = params["at"] - batch["goal"]
    return (off * off).sum() / 2, {"worst": jnp.abs(off).max()}


def start():
    return init_state({"at": jnp.zeros(2)}, OPTIMIZER)


def test_step_reports_loss_gradient_and_the_metrics_of_the_loss():
    state, metrics = make_train_step(distance, OPTIMIZER)(start(), [GOAL])
    assert int(state.step) == 1
    assert {name: float(value) for name, value in metrics.items()} == {"loss": 12.5, "worst": 4.0, "grad_norm": 5.0}


def test_steps_on_one_batch_lower_its_loss():
    state, train_step = start(), make_train_step(distance, OPTIMIZER)
    for _ in range(50):
        state, metrics = train_step(state, [GOAL])
    assert int(state.step) == 50
    assert float(metrics["loss"]) < 12.5 / 4


def test_metrics_change_no_bit_of_the_step():
    def bare(params, batch):
        return distance(params, batch)[0], {}

    ends = []
    for loss_fn in (distance, bare):
        state, train_step = start(), make_train_step(loss_fn, OPTIMIZER)
        for _ in range(3):
            state, _ = train_step(state, [GOAL])
        ends.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)])
    assert ends[0] == ends[1]
    assert ends[0] != [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(start())]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_metric_that_takes_the_name_of_another_is_refused(name: str):
    def loss_fn(params, batch):
        loss, metrics = distance(params, batch)
        return loss, {name: metrics["worst"]}

    with pytest.raises(TypeError, match=name):
        make_train_step(loss_fn, OPTIMIZER)(start(), [GOAL])
