"""The gradient's program of detspec.logprobs compiles for missing devices: kernels are inside, nothing is added by chance.

For a TPU it has no more operations than that of an ordinary trainer, as its compiler counts them, without those of kernels. It
moves more bytes: 1.66 times as many in the shapes below, by the same count.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hlo import kernel_calls

from detspec.generation.logprobs import given_logprobs
from detspec.model.dense import with_fields
from detspec.model.params import Params, param_shapes
from detspec.model.transformer import forward_sequences
from detspec.presets import preset
from detspec.target_compilers import Compiled, compile_for
from detspec.targets import canonical_schedule, target

CFG = with_fields(preset("qwen3_0_6b"), num_layers=2, num_heads=4, num_kv_heads=2, d_model=256, d_ff=512, vocab_size=512)
B, T = 2, 256
FLOAT_SCATTER = re.compile(r"= \(?(?:f32|bf16|f16)\[[^\n]* scatter\((?![^\n]*unique_indices=true)")


def exact(params: Params, tokens: jax.Array, lengths: jax.Array, *, name: str) -> jax.Array:
    """A loss of the log-probabilities that an engine on the device `name` has."""
    numerics = canonical_schedule(target(name), CFG).numerics
    return given_logprobs(params, CFG, tokens, lengths, jnp.full(B, 0.9), numerics=numerics, remat=False).sum()


def ordinary(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """The loss of an ordinary trainer."""
    rounded = jax.tree.map(lambda leaf: leaf.astype(CFG.jax_dtype), params)
    found = jax.nn.log_softmax(forward_sequences(rounded, CFG, tokens)[0] / 0.9, axis=-1)
    wanted = jnp.arange(T)[None, 1:] < lengths[:, None]
    return jnp.where(wanted, jnp.take_along_axis(found[:, :-1], tokens[:, 1:, None], axis=2)[..., 0], 0.0).sum()


def compiled(name: str, loss_fn: object) -> Compiled:
    """The program of value and gradient on float32 masters."""
    masters = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), param_shapes(CFG))
    texts = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((B,), jnp.int32)
    return compile_for(target(name), jax.value_and_grad(loss_fn), masters, *texts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [pytest.param("v6e:2x2", marks=pytest.mark.slow), "h100", pytest.param("v5e:2x2", marks=pytest.mark.sweep)]
)
def test_gradient_has_the_kernels_of_a_pass_and_no_more_operations_than_an_ordinary_one(name: str):
    ours = compiled(name, partial(exact, name=name))
    theirs = compiled(name, ordinary)
    hlo = ours.program.as_text()
    assert kernel_calls(hlo, target(name).platform) >= CFG.num_layers
    assert kernel_calls(theirs.program.as_text(), target(name).platform) == 0
    if target(name).platform == "gpu":
        assert FLOAT_SCATTER.findall(hlo) == []
    else:
        assert ours.flop is not None
        assert theirs.flop is not None
        assert ours.flop <= 1.1 * theirs.flop
