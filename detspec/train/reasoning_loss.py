"""The loss of models that reason, for a whole batch or for a slice of it.

The loss of Thinking States (arXiv 2602.08332, section 4) is `L_LM + L_T`. `L_LM` is the mean cross entropy of the answer's
tokens, `L_T` that of the thoughts' tokens, including the end tokens of trivial thoughts. Thoughts are given in training, so
all states are known beforehand: a step is one parallel pass, and no gradient flows through generated thoughts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.model.transformer import forward_sequences
from detspec.state import NO_TOKEN
from detspec.thinking.blocks import forward_taught
from detspec.train.problems.chunks import Batch
from detspec.train.step import Mean, StepMetrics


class Counts(NamedTuple):
    """Tokens that the losses of a batch are divided by, at least 1 each; float32 scalars."""

    answers: Any
    thoughts: Any


def count(batch: Batch) -> Counts:
    """Numbers of tokens of answers and of thoughts in `batch`."""
    there = batch.thoughts != NO_TOKEN
    return Counts(batch.weights.sum().clip(1.0), there.sum(dtype=np.float32).clip(1.0))


def reasoning_loss(
    params: Params, cfg: ModelConfig, batch: Batch, counts: Counts | None = None
) -> tuple[jax.Array, StepMetrics]:
    """The loss, `L_LM + L_T` for a model that thinks and `L_LM` for others, and teacher-forced accuracies.

    If `batch` is a slice, `counts` are those of the whole batch, and the loss is the slice's share in that of the batch.
    """
    tokens, targets, weights = map(jnp.asarray, (batch.tokens[:, :-1], batch.tokens[:, 1:], batch.weights))
    counts = count(batch) if counts is None else counts
    if cfg.thinking is None:
        logits, _ = forward_sequences(params, cfg, tokens)
        answer_loss, answers = _loss_of(logits, targets, weights, counts.answers)
        return answer_loss, {"answers": answers}
    given = jnp.asarray(batch.thoughts)
    logits, thought_logits = forward_taught(params, cfg, tokens, given)
    answer_loss, answers = _loss_of(logits, targets, weights, counts.answers)
    there = (given != NO_TOKEN).astype(jnp.float32)
    thought_loss, thoughts = _loss_of(thought_logits, jnp.maximum(given, 0), there, counts.thoughts)
    return answer_loss + thought_loss, {"answers": answers, "thoughts": thoughts, "thought_loss": thought_loss}


taught_loss = jax.jit(reasoning_loss, static_argnums=1)


def _loss_of(logits: jax.Array, targets: jax.Array, weights: jax.Array, num_tokens: Any) -> tuple[jax.Array, Mean]:
    """Cross entropy in nats of weighted tokens over `num_tokens`, and the share of rows `[B or B, X]` without a wrong token."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    wrong = ((jnp.argmax(logits, -1) != targets) & (weights > 0)).any(-1)
    counted = (weights > 0).any(-1)
    right = Mean((counted & ~wrong).sum(dtype=jnp.float32), counted.sum(dtype=jnp.float32))
    return (losses * weights).sum() / num_tokens, right
