"""Log-probabilities of whole texts with the bits of generation, and with derivatives: what a trainer needs to be on-policy.

    tokens [B, T]  ->  a few texts at a time  ->  layers over whole texts  ->  a few rows at a time  ->  head, log-softmax

A canonical pass goes through all layers with a few rows at a time; here all rows go through a layer at a time. Both make a row
by the same operations, each of which gives a row the same bits among any others. Derivatives are those of ordinary training.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.environment import chosen_schedule
from detspec.errors import InputError, shown
from detspec.generation.checks import is_traced
from detspec.mesh import check_one_chip
from detspec.model.layers import head_f32, logits_f32
from detspec.model.params import Params
from detspec.model.rows import KEEP, RowOps, exact_ops, kept_ops
from detspec.model.transformer import sequence_streams
from detspec.model.weights import Weight, weights
from detspec.ops.master import Master
from detspec.ops.row_sum import sum_fn
from detspec.sampler import logprobs_with_derivative, tempered
from detspec.schedule import Numerics, Schedule

ROWS = 1024  # tokens that go through the layers together; twice as fast as 4096 on a CPU, whose cache holds no more
LOGITS = 1 << 24  # logits that are there together, 64 MiB


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
    arrays, for `jax.jit`, `jax.grad` and `jax.vmap`. The bits of a text depend on that text, the weights, the temperature and
    the schedule alone: not on its neighbours, their number, or what fills up its row.

    Derivatives are sums in XLA's order, in the dtype of each parameter. The program of a gradient is another program than that
    of the forward pass: compare what it reports with what was generated, as `detspec.rl` does in every step.

    Args:
        params: weights, as `Model.params`, or master weights of the same shapes in float32, which are rounded to `cfg.dtype`.
        cfg: shape of the model, as `Model.cfg`.
        tokens: `[B, T]` int32, texts, filled up with anything.
        lengths: `[B]` int32, tokens of each text.
        temperature: what logits are divided by, above 0; for all texts or `[B]`, float32.
        schedule: numerics of the canonical pass, of which the bits are; the device's default if None.
        remat: derivatives work out the inside of each layer once more, instead of keeping it. Without it, where there are more
            than a few texts, they keep products and attention, and work out the rest once more. It changes no log-probability.

    Returns:
        float32 `[B, T]`: entry `p` is about the token at position `p`, given those before it. 0 for the first token
        and from the text's end on.

    Raises:
        InputError: shapes contradict each other; the model thinks, or its weights or its cache are in int8; the weights lie on
            several chips; windows of the schedule are aligned.
    """
    check_one_chip(params, "logprobs")
    schedule = chosen_schedule(schedule, cfg)
    params = unknown(params, tokens, lengths, temperature)
    tokens, lengths, temperatures = _checked(cfg, schedule.numerics, tokens, lengths, temperature)
    return given_logprobs(params, cfg, tokens, lengths, temperatures, numerics=schedule.numerics, remat=remat)


@partial(jax.jit, static_argnames=("cfg", "numerics", "remat"))  # operations that are called one by one round more often
def given_logprobs(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    temperatures: jax.Array,
    *,
    numerics: Numerics,
    remat: bool,
) -> jax.Array:
    """`logprobs` at the temperature of each text, `[B]`, for any device that `numerics` are for."""
    T = tokens.shape[1]
    head_ops = exact_ops(cfg, numerics)
    ops = kept_ops(head_ops)
    masters = _masters(params, cfg)

    def of_texts(tokens: jax.Array, temperatures: jax.Array) -> jax.Array:
        stream = sequence_streams(masters, cfg, tokens, ops, remat=remat)[-1]
        normed = ops.normed(stream, masters, "final_norm").reshape(-1, cfg.d_model)
        # A temperature that the compiler knew would be divided by as a factor, which it fuses with a following sum.
        unknown = jnp.where(jnp.isnan(normed[:, 0]), 1.0, jnp.repeat(temperatures, T))
        following = jnp.roll(tokens, -1, axis=1).reshape(-1)
        of_rows = partial(_of_rows, masters, cfg, head_ops, logprobs_with_derivative(sum_fn(numerics)))
        found = in_chunks(of_rows, LOGITS // cfg.vocab_size, normed, following, unknown)
        return jnp.roll(found.reshape(tokens.shape), 1, axis=1)

    # Checkpoints of layers within those of chunks would have other bits: the stream is rounded where an inner one begins.
    found = in_chunks(of_texts, ROWS // T, tokens, temperatures, again=not remat)
    position = jnp.arange(T, dtype=jnp.int32)[None, :]
    return jnp.where((position >= 1) & (position < lengths[:, None]), found, 0.0)


def logits(
    params: Params, cfg: ModelConfig, tokens: jax.Array, *, schedule: Schedule | None = None, remat: bool = False
) -> jax.Array:
    """Logits of given texts with the bits that a canonical pass has, differentiable in `params`: float32 `[B, T, V]`.

    For trainers that work out log-probabilities by themselves; arguments and errors as in `logprobs`, `tokens [B, T]` int32.
    XLA adds up a softmax in another order, and divides by a temperature within it, so theirs may differ in the last bits.
    """
    check_one_chip(params, "logits")
    schedule = chosen_schedule(schedule, cfg)
    params = unknown(params, tokens)
    tokens, *_ = _checked(cfg, schedule.numerics, tokens, jnp.zeros(len(tokens), jnp.int32), 1.0)
    return _logits(params, cfg, tokens, numerics=schedule.numerics, remat=remat)


@partial(jax.jit, static_argnames=("cfg", "numerics", "remat"))
def _logits(params: Params, cfg: ModelConfig, tokens: jax.Array, *, numerics: Numerics, remat: bool) -> jax.Array:
    ops = exact_ops(cfg, numerics)
    masters = _masters(params, cfg)

    def of_texts(tokens: jax.Array) -> jax.Array:
        return logits_f32(masters, cfg, sequence_streams(masters, cfg, tokens, ops, remat=remat)[-1], ops)

    return in_chunks(of_texts, ROWS // tokens.shape[1], tokens)


def _of_rows(
    params: Params,
    cfg: ModelConfig,
    ops: RowOps,
    logprobs_at: Callable[[jax.Array, jax.Array], jax.Array],
    normed: jax.Array,
    tokens: jax.Array,
    temperatures: jax.Array,
) -> jax.Array:
    """Log-probabilities of `tokens [R]` after rows `normed [R, D]`."""
    return logprobs_at(tempered(head_f32(params, cfg, normed, ops), temperatures), tokens)


def in_chunks(fn: Callable[..., jax.Array], size: int, *by_row: jax.Array, again: bool = True) -> jax.Array:
    """`fn(*by_row)` of arrays `[n, ...]`, at most about `size` rows at a time; derivatives work out each chunk `again`.

    So what `fn` makes on its way is there for one chunk at a time, but for what `kept_ops` keep. 5 rows by 2: chunks of 2, 2
    and 1 with one that fills it up.
    """
    n = by_row[0].shape[0]
    number = -(-n // max(size, 1))
    if number == 1:
        return fn(*by_row)
    size = -(-n // number)
    filled = [jnp.pad(x, [(0, number * size - n), *[(0, 0)] * (x.ndim - 1)]) for x in by_row]
    chunks = [x.reshape(number, size, *x.shape[1:]) for x in filled]
    of_chunk: Callable[..., jax.Array] = lambda chunk: fn(*chunk)  # noqa: E731
    found = jax.lax.map(jax.checkpoint(of_chunk, policy=KEEP) if again else of_chunk, chunks)
    return found.reshape(number * size, *found.shape[2:])[:n]


def unknown(params: Params, *given: Any) -> Params:
    """`params` whose values the compiler does not know, as in an engine's program; `given` are the other arguments.

    `jax.jit(lambda tokens: logprobs(params, cfg, tokens, lengths))` makes constants of them. A product with a norm's scale that
    is known to be 1 would vanish, and the product before it would be joined with the sum that follows.
    """
    leaves, structure = jax.tree.flatten(params)
    traced = [leaf for leaf in (*leaves, *given) if is_traced(leaf)]
    constant = [index for index, leaf in enumerate(leaves) if jnp.ndim(leaf) < 2 and not is_traced(leaf)]
    if not traced or not constant:
        return params
    # It never holds, which a compiler does not know: neither token ids nor lengths are negative, and no weight is nan.
    never = jnp.stack([(jnp.isnan(x) if jnp.issubdtype(x.dtype, jnp.floating) else x < 0).all() for x in traced]).any()
    vectors = [jnp.asarray(leaves[index]) for index in constant]
    # Compilers take the choice of `jnp.where` out of a loop, and know the vectors again.
    vectors = jax.lax.cond(never, lambda: [jnp.full_like(leaf, jnp.nan) for leaf in vectors], lambda: vectors)
    for index, leaf in zip(constant, vectors, strict=True):
        leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves)


def _masters(params: Params, cfg: ModelConfig) -> Any:
    """`params` as `exact_ops` take them: masters of matrices and tables, the rest rounded to the model's dtypes."""

    def rounded(declared: Weight, leaf: jax.Array) -> Any:
        dtype = declared.dtype(cfg)
        return Master.of(leaf, dtype) if len(declared.axes) > 1 else leaf.astype(dtype)

    return jax.tree.map(rounded, weights(cfg), params)


def check_trains(cfg: ModelConfig, numerics: Numerics) -> None:
    """Raises `InputError` for a model or numerics without derivatives."""
    what = ""
    if cfg.thinking is not None:
        what = "a model that thinks"
    elif cfg.weights is not None:
        what = f"weights in {cfg.weights}, which have no derivative"
    elif numerics.cache_dtype == "int8":
        what = "a cache in int8, whose rounding has no derivative"
    elif numerics.alignment != "free":
        what = f"windows that are aligned (Numerics.alignment {numerics.alignment!r})"
    if what:
        raise InputError(
            f"detspec.logprobs does not take {what}: take a model in {cfg.dtype} with free windows and no thoughts"
        )


def _checked(cfg: ModelConfig, numerics: Numerics, tokens: Any, lengths: Any, temperature: Any) -> tuple[jax.Array, ...]:
    """Tokens, lengths and the temperature of each text as arrays; `InputError` for what `logprobs` does not take."""
    check_trains(cfg, numerics)
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
    is_known = not is_traced(temperature)
    if jnp.shape(temperature) not in ((), lengths.shape) or (is_known and not (np.asarray(temperature) > 0).all()):
        given = shown(np.asarray(temperature).tolist()) if is_known else jnp.shape(temperature)
        raise InputError(f"detspec.logprobs takes a temperature above 0, for all texts or [B], got {given}")
    return tokens, lengths, jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), lengths.shape)
