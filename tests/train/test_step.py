"""One optimiser step against the arithmetic it should be."""

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.train.config import Phase, TrainConfig
from detspec.train.step import init_state, lr_schedule, make_optimizer, make_train_step, token_losses

MODEL = ModelConfig(
    vocab_size=16, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16, max_position=16, dtype="float32"
)
CONFIG = TrainConfig(
    model=MODEL, corpus="unused", phases=(Phase(50, 2, 8),), peak_lr=1e-2, final_lr=1e-3, warmup_steps=5, weight_decay=0.5
)
losses_of = jax.jit(token_losses, static_argnums=1)
state_of = jax.jit(init_state, static_argnums=0)
ROWS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 9)), jnp.int32)


def test_zero_weights_give_the_loss_of_a_uniform_guess():
    params = jax.tree.map(jnp.zeros_like, state_of(CONFIG).params)
    losses = losses_of(params, MODEL, ROWS)
    assert losses.shape == (2, 8)
    np.testing.assert_allclose(losses, np.log(16.0), rtol=1e-6)  # log computed by numpy in float64


def test_learning_rate_warms_up_and_ends_at_the_final_one():
    schedule = lr_schedule(CONFIG)
    assert float(schedule(0)) == 0.0
    np.testing.assert_allclose([float(schedule(5)), float(schedule(50))], [1e-2, 1e-3], rtol=1e-6)


def test_steps_on_one_batch_lower_its_loss():
    state = state_of(CONFIG)
    train_step = make_train_step(CONFIG)
    first = float(losses_of(state.params, MODEL, ROWS).mean())
    for _ in range(50):
        state, metrics = train_step(state, ROWS)
    assert int(state.step) == 50
    assert float(metrics["loss"]) < first / 4


def test_weight_decay_spares_norm_scales():
    state = state_of(CONFIG)
    no_gradient = jax.tree.map(jnp.zeros_like, state.params)
    updates, _ = jax.jit(make_optimizer(CONFIG).update)(no_gradient, at_peak(state.opt_state), state.params)
    assert not np.asarray(updates["final_norm"]).any()
    np.testing.assert_allclose(updates["embed"], -1e-2 * 0.5 * np.asarray(state.params["embed"]), rtol=1e-5)


def at_peak(opt_state):
    """The same optimiser state after the steps of warm-up."""
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, 5) if leaf.dtype == jnp.int32 else leaf, opt_state)
