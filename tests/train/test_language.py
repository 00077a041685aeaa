"""Language models: their configs, and the loss against the arithmetic it should be."""

import dataclasses

import jax
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.model.dense import dense_config
from detspec.model.params import init_params, param_shapes
from detspec.train.batches import Phase
from detspec.train.language import LanguageConfig, token_losses
from detspec.train.optimizer import OptimizerConfig, make_optimizer
from detspec.train.step import init_state, make_train_step

MODEL = dense_config(
    vocab_size=16, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16, max_position=64, dtype="float32"
)
CONFIG = LanguageConfig(
    model=MODEL,
    corpus="unused",
    phases=(Phase(4, 2, 8),),
    optimizer=OptimizerConfig(peak_lr=1e-2, final_lr=1e-3, warmup_steps=2),
)
ROWS = np.random.default_rng(0).integers(0, 16, (2, 9)).astype(np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": ()}, "at least one phase"),
        ({"seed": -1}, "LanguageConfig.seed must be an integer of at least 0, got -1"),
        ({"phases": (Phase(3, 1, 65),)}, "seq_len 65 exceeds model.max_position 64"),
        ({"model": dataclasses.replace(MODEL, dtype="bfloat16")}, "got 'bfloat16'"),
        ({"phases": (Phase(1, 1, 8), Phase(1, 1, 8))}, r"warmup_steps must be an integer in \[0, 2\), .* got 2"),
        ({"checkpoint_every": 0}, "LanguageConfig.checkpoint_every must be a positive integer, .*got 0"),
        ({"eval_tokens": 1.5}, "eval_tokens must be a positive integer, .*got 1.5"),
    ],
)
def test_bad_config_is_refused(changes, message: str):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_steps_and_tokens_are_those_of_all_phases():
    config = dataclasses.replace(CONFIG, phases=(Phase(2, 3, 8), Phase(3, 1, 32)))
    assert config.num_steps == 5
    assert config.num_tokens == 2 * 24 + 3 * 32


def test_zero_weights_give_the_loss_of_a_uniform_guess():
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), param_shapes(MODEL))
    losses = jax.jit(token_losses, static_argnums=1)(params, MODEL, ROWS)
    assert losses.shape == (2, 8)
    np.testing.assert_allclose(losses, np.log(16.0), rtol=1e-6)  # log computed by numpy in float64


def test_steps_on_one_batch_lower_its_loss():
    optimizer = make_optimizer(CONFIG.optimizer, 50)
    train_step = make_train_step(lambda params, rows: (token_losses(params, MODEL, rows).mean(), {}), optimizer)
    state = init_state(init_params(MODEL, jax.random.key(0)), optimizer)
    state, first = train_step(state, [ROWS])
    for _ in range(49):
        state, metrics = train_step(state, [ROWS])
    assert float(metrics["loss"]) < float(first["loss"]) / 4
