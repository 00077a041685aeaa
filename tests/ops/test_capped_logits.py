"""Logits that a model caps or divides: their log-probabilities are the same bits in one program and in two.

A request that asks for its own logits makes them a result of their own; next to others it shares a program without that.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.model.dense import dense_config
from detspec.model.layers import capped
from detspec.ops.row_sum import fixed_sum
from detspec.sampler import logprobs_at

pytestmark = pytest.mark.optimised

SIZES = (256, 64, 2, 4, 2, 16, 128)
CFGS = {"soft cap": dense_config(*SIZES, logit_softcap=3.0), "divisor": dense_config(*SIZES, logit_divisor=3.0)}


def differing(cap_fn: Callable[[jax.Array], jax.Array]) -> int:
    """How many log-probabilities of made-up logits have other bits in two programs than in one."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (512, 256)).astype(np.float32)
    tokens = rng.integers(0, 256, 512).astype(np.int32)
    one = jax.jit(lambda logits: logprobs_at(cap_fn(logits), tokens, fixed_sum))(logits)
    two = jax.jit(lambda logits: logprobs_at(logits, tokens, fixed_sum))(jax.jit(cap_fn)(logits))
    return int((np.asarray(one).view(np.int32) != np.asarray(two).view(np.int32)).sum())


@pytest.mark.parametrize("name", CFGS)
def test_log_probabilities_of_capped_and_divided_logits_are_the_same_bits_in_one_program_and_in_two(name: str):
    assert differing(lambda logits: capped(CFGS[name], logits)) == 0


@pytest.mark.parametrize("left_alone", [lambda x: 3 * jnp.tanh(x / 3), lambda x: x / np.float32(3)], ids=CFGS)
def test_control_products_that_are_left_alone_are_joined_with_the_sum(left_alone: Callable[[jax.Array], jax.Array]):
    assert differing(left_alone) > 0
