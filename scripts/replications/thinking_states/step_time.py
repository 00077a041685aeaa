"""The time of a training step by its number of chunks: one parallel pass compared with a loop through time."""

import dataclasses
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from detspec.config import ModelConfig
from detspec.model.params import Params, init_params
from detspec.state import NO_TOKEN
from detspec.thinking.blocks import thinking_of
from detspec.train.optimizer import OptimizerConfig, make_optimizer
from detspec.train.problems.chunks import Batch
from detspec.train.reasoning_loss import reasoning_loss
from detspec.train.step import StepMetrics, init_state, make_train_step
from scripts.replications.thinking_states.unrolled import forward_unrolled
from scripts.replications.turns import Prepare, time_by_turns

# (params, cfg, batch) -> loss and metrics
Loss = Callable[[Params, ModelConfig, Batch], tuple[jax.Array, StepMetrics]]


def step_times(
    cfg: ModelConfig, *, shape: tuple[int, int], thought_tokens: int, num_chunks: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Milliseconds of a whole optimiser step, for each of `num_chunks`, in turn within this process.

    Rows and thought tokens per row are fixed; only the cut into chunks differs. So the work is nearly the same, and what grows
    is the number of dependent steps.

    Args:
        cfg: a model that thinks, in float32.
        shape: `(B, T)`, rows and tokens of each.
        thought_tokens: thought tokens per row, divided among its chunks.
        num_chunks: numbers of chunks per row; each divides `T` and `thought_tokens`.
        repeats: rounds.

    Returns:
        For each number of chunks the medians "parallel_ms" for `reasoning_loss` and "unrolled_ms" for a loss through time, and
        the median "ratio" of the two within a round.
    """
    losses: dict[str, Loss] = {"parallel": reasoning_loss, "unrolled": unrolled_loss}
    cases: dict[str, Prepare] = {}
    for number in num_chunks:
        cut = cut_in(cfg, shape[1], thought_tokens, number)
        batch = random_batch(cut, shape, number)
        cases |= {f"{name} {number}": _step(cut, loss, batch) for name, loss in losses.items()}
    seconds = time_by_turns(cases, repeats)
    found = []
    for number in num_chunks:
        parallel = seconds[f"parallel {number}"]
        unrolled = seconds[f"unrolled {number}"]
        found.append(
            {
                "chunks": number,
                "chunk": shape[1] // number,
                "thought": thought_tokens // number,
                "parallel_ms": 1e3 * median(parallel),
                "unrolled_ms": 1e3 * median(unrolled),
                "ratio": median(slow / fast for slow, fast in zip(unrolled, parallel, strict=True)),
            }
        )
    return found


def cut_in(cfg: ModelConfig, length: int, thought_tokens: int, num_chunks: int) -> ModelConfig:
    """The config with rows of `length` tokens cut into `num_chunks`, each with its share of a row's `thought_tokens`."""
    share = dataclasses.replace(thinking_of(cfg), chunk=length // num_chunks, max_thought=thought_tokens // num_chunks)
    return dataclasses.replace(cfg, thinking=share)


def unrolled_loss(params: Params, cfg: ModelConfig, batch: Batch) -> tuple[jax.Array, StepMetrics]:
    """Cross entropy of the next tokens, through time; thoughts are not used."""
    tokens, targets, weights = map(jnp.asarray, (batch.tokens[:, :-1], batch.tokens[:, 1:], batch.weights))
    losses = optax.softmax_cross_entropy_with_integer_labels(forward_unrolled(params, cfg, tokens), targets)
    return (losses * weights).sum() / weights.sum(), {}


def random_batch(cfg: ModelConfig, shape: tuple[int, int], num_chunks: int) -> Batch:
    """Random ids `[B, T]`, `shape`, in rows of `num_chunks` chunks, each with a thought of `M` tokens."""
    thinking = thinking_of(cfg)
    rng = np.random.default_rng(num_chunks)
    B, T = shape
    thoughts = rng.integers(2, cfg.vocab_size, (B, num_chunks, thinking.max_thought)).astype(np.int32)
    thoughts[:, :, -1] = thinking.end_id
    thoughts[:, -1] = NO_TOKEN  # the last chunk has none
    ids = rng.integers(2, cfg.vocab_size, (B, T + 1)).astype(np.int32)
    return Batch(ids, np.ones((B, T), np.float32), thoughts)


def _step(cfg: ModelConfig, loss: Loss, batch: Batch) -> Prepare:
    optimizer = make_optimizer(OptimizerConfig(peak_lr=1e-3, final_lr=1e-4, warmup_steps=1), 1000)
    step = make_train_step(lambda params, batch: loss(params, cfg, batch), optimizer)
    placed = jax.tree.map(jnp.asarray, batch)
    params = init_params(cfg, jax.random.key(0))

    def prepare() -> Any:
        state = init_state(jax.tree.map(jnp.copy, params), optimizer)  # the step takes the one it is given
        return lambda: step(state, [placed])  # one slice

    return prepare
