"""Choosing tokens: a pure function of the logits, the row's parameters, its seed and the position.

Gumbel-max: `argmax(logits / temperature + noise)`, where the noise of position `p` is keyed by `fold_in(key(seed), p)`. Draft
and canonical pass share it, so equal logits give equal tokens at any temperature, and rolling back needs no undo of a
random state.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import Schedule
from detspec.errors import InputError
from detspec.ops.row_sum import SumFn, sum_fn
from detspec.state import RowSampling


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. Names and meanings are vLLM's; the default is greedy.

    Attributes:
        max_tokens: most new tokens, at least 1.
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the `k` likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches `p`; 1 keeps all.
        min_p: keep tokens at least `min_p` times as likely as the likeliest; 0 keeps all.
        seed: of the request's noise, 0 .. 2**32-1; position and seed decide it, nothing else.
        stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens. The stop token is kept.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        deterministic: verify canonically before anything is committed. False commits the fast path's tokens as they come.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        stop_token_ids: Any = self.stop_token_ids
        if isinstance(stop_token_ids, str) or not isinstance(stop_token_ids, Iterable):
            raise InputError(f"sampling parameter stop_token_ids must be a list of token ids, got {stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(stop_token_ids))
        whole, number = (int, np.integer), (int, float, np.integer, np.floating)
        accepted: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
            "max_tokens": (whole, lambda x: x >= 1, "an integer of at least 1"),
            "temperature": (number, lambda x: 0 <= x <= 1e6, "a number in 0 .. 1e6 (0 is greedy)"),
            "top_k": (whole, lambda x: 0 <= x < 2**31, "an integer in 0 .. 2**31-1 (0 keeps all tokens)"),
            "top_p": (number, lambda x: 0 < x <= 1, "a number in (0, 1]"),
            "min_p": (number, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
            "seed": (whole, lambda x: 0 <= x < 2**32, "an integer in 0 .. 2**32-1"),
            "ignore_eos": (bool, lambda x: True, "true or false"),
            "deterministic": (bool, lambda x: True, "true or false"),
        }
        for name, (kinds, holds, sentence) in accepted.items():
            value = getattr(self, name)
            if (isinstance(value, bool) and kinds is not bool) or not isinstance(value, kinds) or not holds(value):
                raise InputError(f"sampling parameter {name} must be {sentence}, got {value!r}")
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, whole) or token < 0:
                raise InputError(f"sampling parameter stop_token_ids must hold integers of at least 0, got {token!r}")


def row_sampling(params: list[SamplingParams]) -> RowSampling:
    """Stacks the parameters of `B` requests into per-row arrays."""
    return RowSampling(
        temperature=jnp.asarray([p.temperature for p in params], jnp.float32),
        top_k=jnp.asarray([p.top_k for p in params], jnp.int32),
        top_p=jnp.asarray([p.top_p for p in params], jnp.float32),
        min_p=jnp.asarray([p.min_p for p in params], jnp.float32),
        seed=jnp.asarray([p.seed for p in params], jnp.uint32),
    )


def sample(logits_f32: jax.Array, position: jax.Array, rows: RowSampling, *, schedule: Schedule) -> tuple[jax.Array, jax.Array]:
    """Chooses one token for each of `R` rows.

    Args:
        logits_f32: `[R, V]`.
        position: `[R]` int32, the absolute position that the chosen token will have.
        rows: parameters of each row, `[R]`.
        schedule: its `reductions` order the sum of the log-probability.

    Returns:
        Tokens `[R]` int32 and their raw log-probabilities `[R]` float32: of the model's own distribution, before
        temperature and filters. A row with a nan or +inf logit gets nan.
    """
    with jax.named_scope("sample"):
        random = rows.temperature > 0
        filtered = random & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))

        def perturb(logits: jax.Array) -> jax.Array:
            scaled = logits / jnp.where(random, rows.temperature, 1.0)[:, None]
            floor = jax.lax.cond(jnp.any(filtered), _filter_floor, lambda scaled, rows: scaled.min(-1), scaled, rows)
            kept = jnp.where(scaled >= jnp.where(filtered, floor, -jnp.inf)[:, None], scaled, -jnp.inf)
            return jnp.where(random[:, None], kept + _gumbel(rows.seed, position, logits.shape[1]), logits)

        chosen_by = jax.lax.cond(jnp.any(random), perturb, lambda logits: logits, logits_f32)
        tokens = _first_largest(chosen_by)
        return tokens, _raw_logprobs(logits_f32, tokens, sum_fn(schedule))


def _first_largest(x: jax.Array) -> jax.Array:
    """`argmax` of `x [R, V]` over its last axis, V - 1 for a row with a nan; two plain reductions vectorise on the CPU."""
    V = x.shape[1]
    index = jnp.arange(V, dtype=jnp.int32)[None, :]
    return jnp.where(x == x.max(-1, keepdims=True), index, V - 1).min(-1)


def _gumbel(seed: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise `[R, V]`, each row's from `(seed, position)` alone."""

    def row_noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab_size,), jnp.float32)

    return jax.vmap(row_noise)(seed, position)


def _filter_floor(scaled: jax.Array, rows: RowSampling) -> jax.Array:
    """The least scaled logit that min_p, then top_k, then top_p keep, `[R]`; ties with it are kept too.

    The cumulative sum is an associative scan, elementwise additions in an order fixed by `V` alone.
    """
    V = scaled.shape[1]
    ranked = -jnp.sort(-scaled, axis=-1)
    rank = jnp.arange(V, dtype=jnp.int32)[None, :]
    p = jnp.exp(ranked - ranked[:, :1])
    keep = p >= rows.min_p[:, None]
    keep &= (rank < rows.top_k[:, None]) | (rows.top_k == 0)[:, None]
    p = jnp.where(keep, p, 0.0)
    reached = jax.lax.associative_scan(jnp.add, p, axis=1)
    keep &= (reached - p < rows.top_p[:, None] * reached[:, -1:]) | (rows.top_p >= 1)[:, None]
    return jnp.where(keep | (rank == 0), ranked, jnp.inf).min(-1)


def _raw_logprobs(logits_f32: jax.Array, tokens: jax.Array, sum_row: SumFn) -> jax.Array:
    """Log-softmax of `logits_f32 [R, V]` at `tokens [R]`."""
    largest = logits_f32.max(-1)
    log_sum = jnp.log(sum_row(jnp.exp(logits_f32 - largest[:, None])))
    return jnp.take_along_axis(logits_f32, tokens[:, None], axis=1)[:, 0] - largest - log_sum
