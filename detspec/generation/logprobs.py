"""Log-probabilities of whole texts with the bits of generation, and with derivatives: what a trainer needs to be on-policy.

    tokens [B, T]  ->  layers over whole sequences  ->  stream [B, T, D]  ->  head, temperature, log-softmax, chunk by chunk

A canonical pass goes through all layers with a few rows at a time; here all rows go through a layer at a time. Both make a row
by the same operations, each of which gives a row the same bits among any others. Derivatives are those of ordinary training.
"""

from typing import Any

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.environment import chosen_schedule
from detspec.errors import InputError
from detspec.mesh import check_one_chip
from detspec.model.layers import head_f32
from detspec.model.params import Params
from detspec.model.rows import RowOps, exact_ops
from detspec.model.transformer import sequence_streams
from detspec.model.weights import Weight, weights
from detspec.ops.master import Master
from detspec.ops.row_sum import sum_fn
from detspec.sampler import logprobs_with_derivative, tempered
from detspec.schedule import Numerics, Schedule

HEAD_NUMBERS = 1 << 22  # logits of a chunk: 16 MiB


def logprobs(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    schedule: Schedule | None = None,
    remat: bool = False,
) -> jax.Array:
    """Log-probabilities of given texts, with the bits that generation reports, differentiable in `params`.

    They are those of `SamplingParams(logprobs_mode="tempered")`, at a temperature of 1 those of "raw", too. A pure function of
    arrays, for `jax.jit` and `jax.grad`. The bits of a text depend on that text, the weights, the temperature and the schedule
    alone: not on its neighbours, their number, or what fills up its row.

    Derivatives are sums in XLA's order, in the dtype of each parameter. The program of a gradient is another program than that
    of the forward pass: compare what it reports with what was generated, as `detspec.rl` does in every step.

    Args:
        params: weights, as `Model.params`, or master weights of the same shapes in float32, which are rounded to `cfg.dtype`.
        cfg: shape of the model, as `Model.cfg`.
        tokens: `[B, T]` int32, texts, filled up with anything.
        lengths: `[B]` int32, tokens of each text.
        temperature: what logits are divided by, above 0; for all texts or `[B]`, float32.
        schedule: numerics of the canonical pass, of which the bits are; the device's default if None.
        remat: derivatives work out the inside of each layer once more, instead of keeping it. It changes no log-probability.

    Returns:
        float32 `[B, T]`: entry `p` is about the token at position `p`, given those before it. 0 before `start` and from the
        text's end on.

    Raises:
        InputError: shapes contradict each other; the model thinks, or its weights or its cache are in int8; the weights lie on
            several chips; windows of the schedule are aligned; jax.vmap takes it.
    """
    check_one_chip(params, "logprobs")
    schedule = chosen_schedule(schedule, cfg)
    tokens, lengths = _checked(params, cfg, schedule.numerics, tokens, lengths)
    B, T = tokens.shape
    numerics = schedule.numerics
    ops = exact_ops(cfg, numerics)
    masters = _masters(params, cfg)
    stream = sequence_streams(masters, cfg, tokens, ops, remat=remat)[-1]
    normed = ops.normed(stream, masters, "final_norm")
    # A temperature that the compiler knew would be divided by as a factor, which it fuses with what follows, see `tempered`.
    at = jnp.where(lengths > 0, jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B,)), 1.0)
    following = jnp.roll(tokens, -1, axis=1).reshape(-1)
    found = _of_rows(masters, cfg, normed.reshape(B * T, -1), following, jnp.repeat(at, T), ops, numerics).reshape(B, T)
    position = jnp.arange(T, dtype=jnp.int32)[None, :]
    wanted = (position >= 1) & (position < lengths[:, None])
    return jnp.where(wanted, jnp.roll(found, 1, axis=1), 0.0)


def _of_rows(
    params: Params,
    cfg: ModelConfig,
    normed: jax.Array,
    tokens: jax.Array,
    temperature: jax.Array,
    ops: RowOps,
    numerics: Numerics,
) -> jax.Array:
    """Log-probabilities of `tokens [R]` after rows `normed [R, D]`, in chunks of rows: one chunk's logits are there at once."""
    logprobs_at = logprobs_with_derivative(sum_fn(numerics))

    @jax.checkpoint
    def of_chunk(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        normed, tokens, temperature = chunk
        return logprobs_at(tempered(head_f32(params, cfg, normed, ops), temperature), tokens)

    R = tokens.shape[0]
    rows = max(8, HEAD_NUMBERS // cfg.vocab_size)
    number = -(-R // rows)
    rows = -(-R // number)
    filled = jax.tree.map(
        lambda x: jnp.pad(x, [(0, number * rows - R), *[(0, 0)] * (x.ndim - 1)]).reshape(number, rows, *x.shape[1:]),
        (normed, tokens, temperature),
    )
    return jax.lax.map(of_chunk, filled).reshape(-1)[:R]


def _masters(params: Params, cfg: ModelConfig) -> Any:
    """`params` as `exact_ops` take them: masters of what is multiplied or looked up, the rest rounded to the model's dtypes."""

    def rounded(declared: Weight, leaf: jax.Array) -> Any:
        dtype = declared.dtype(cfg)
        return Master.of(leaf, dtype) if declared.is_matrix or declared.looked_up else leaf.astype(dtype)

    return jax.tree.map(rounded, weights(cfg), params)


def _checked(params: Params, cfg: ModelConfig, numerics: Numerics, tokens: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    """The texts as arrays; `InputError` for what `logprobs` does not take."""
    what = ""
    if cfg.thinking is not None:
        what = "a model that thinks"
    elif cfg.weights is not None:
        what = "weights in int8, which have no derivative"
    elif numerics.cache_dtype == "int8":
        what = "a cache in int8, whose rounding has no derivative"
    elif numerics.alignment != "free":
        what = f"windows that are aligned (Numerics.alignment {numerics.alignment!r})"
    if what:
        raise InputError(
            f"detspec.logprobs does not take {what}: take a model in {cfg.dtype} with free windows and no thoughts"
        )
    tokens = jnp.asarray(tokens)
    lengths = jnp.asarray(lengths)
    is_int = tokens.dtype == jnp.int32 and lengths.dtype == jnp.int32
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1] or 0 in tokens.shape or not is_int:
        raise InputError(
            f"detspec.logprobs takes tokens [B, T] and lengths [B], int32, got {tokens.dtype} {tokens.shape} and "
            f"{lengths.dtype} {lengths.shape}"
        )
    if tokens.shape[1] > cfg.max_position:
        raise InputError(
            f"texts of {tokens.shape[1]} tokens exceed the {cfg.max_position} positions that the model was made for"
        )
    return tokens, lengths
