"""The parallel pass of training: given thoughts say all states at once, so nothing runs through time.

C = 4, thoughts Z0 Z1 after the first two chunks:

    tokens    t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 ...
    injected  0  0  0  0  | states(Z0)  | states(Z1)     in the forward direction a state depends on given tokens alone
"""

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.model.transformer import forward_sequences
from detspec.state import Injected
from detspec.thinking.blocks import compress_sequences, think_sequences, thinking_of


def forward_taught(params: Params, cfg: ModelConfig, tokens: jax.Array, thoughts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits of the text and of the thoughts, in one differentiable pass (Thinking States, section 4).

    Args:
        tokens: `[B, T]` int32, from position 0.
        thoughts: `[B, X, M]` int32, the thought after chunk `i` of `X = T // C`; all NO_TOKEN where there is none.

    Returns:
        Logits of the tokens that follow, float32 `[B, T, V]`, and of the thoughts' tokens, float32 `[B, X, M, V]`.
    """
    thinking = thinking_of(cfg)
    B, T = tokens.shape
    _, X, M = thoughts.shape
    C = thinking.chunk
    states = compress_sequences(params, cfg, thoughts.reshape(B * X, M)).reshape(B, X * C, -1)
    inject = jnp.pad(states, ((0, 0), (C, C), (0, 0)))[:, :T]
    logits, tapped = forward_sequences(
        params, cfg, tokens, inject=Injected(thinking.in_layer, inject), tap_layer=thinking.out_layer
    )
    assert tapped is not None
    chunks = tapped[:, : X * C].reshape(B * X, C, -1)
    return logits, think_sequences(params, cfg, chunks, thoughts.reshape(B * X, M)).reshape(B, X, M, -1)
