"""The optimiser against the arithmetic it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.train.optimizer import OptimizerConfig, lr_schedule, make_optimizer

CONFIG = OptimizerConfig(peak_lr=1e-2, final_lr=1e-3, warmup_steps=5, weight_decay=0.5)
PARAMS = {"matrix": jnp.float32([[1.0, -2.0], [3.0, 0.5]]), "norm": jnp.float32([1.0, 1.0])}


def test_learning_rate_warms_up_and_ends_at_the_final_one():
    schedule = lr_schedule(CONFIG, 50)
    assert float(schedule(0)) == 0.0
    np.testing.assert_allclose([float(schedule(5)), float(schedule(50))], [1e-2, 1e-3], rtol=1e-6)


def test_weight_decay_spares_norm_scales():
    optimizer = make_optimizer(CONFIG, 50)
    no_gradient = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = jax.jit(optimizer.update)(no_gradient, at_peak(optimizer.init(PARAMS)), PARAMS)
    assert not np.asarray(updates["norm"]).any()
    np.testing.assert_allclose(updates["matrix"], -1e-2 * 0.5 * np.asarray(PARAMS["matrix"]), rtol=1e-5)


def at_peak(opt_state):
    """Returns the optimiser state after the steps of warm-up."""
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, 5) if leaf.dtype == jnp.int32 else leaf, opt_state)


@pytest.mark.parametrize("num_steps", [5, 1])
def test_warmup_that_outlasts_the_run_is_refused(num_steps: int):
    CONFIG.require_warmup_within(6)
    with pytest.raises(InputError, match=rf"warmup_steps must be an integer in \[0, {num_steps}\), .* got 5"):
        CONFIG.require_warmup_within(num_steps)
