"""Chooses tokens: a pure function of the logits, the row's parameters and seed, the position and the text before it.

Gumbel-max: `argmax(processed / temperature + noise)`. The noise at a position is a hash of the seed and the position.
`processed` are the logits after bias, minimum length and penalties, which are counted from the text before `p` each time.
Draft and canonical pass share all of this, so equal logits give equal tokens at any temperature. There is no random state
and no counter to roll back.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detspec.choices import LOGPROBS_MODES
from detspec.config import ModelConfig
from detspec.filters import first_kept, is_filtered, narrowed
from detspec.integer.spec import LIMIT
from detspec.ops import integer_choices
from detspec.ops.gumbel import gumbel
from detspec.ops.implementations import operations
from detspec.ops.integer_functions import integer_functions
from detspec.ops.row_sum import SumFn, first_largest, fixed_sum, sum_fn
from detspec.riders.rider import Capacity, Entry, Rider, Rows, TextsFn
from detspec.riders.riding import ProcessFn, Riders
from detspec.sampling_params import SamplingParams, sampling_arrays
from detspec.schedule import Numerics
from detspec.state import NO_TOKEN, SamplingArrays

RAW, PROCESSED, TEMPERED = range(len(LOGPROBS_MODES))
ChooseFn = Callable[[jax.Array, jax.Array, dict[str, Any], TextsFn], tuple[jax.Array, jax.Array]]
CERTAIN = 1e30  # a quotient so large that noise does not change it
NEAR_ZERO = 1e-20  # bound of temperatures near 0: quotients of others are too large for float32 only if logits are above 1e18


class Numbers(NamedTuple):
    """Functions of logits, for those in floats and for those of integer models, fixed int32."""

    tempered: Callable[[jax.Array, jax.Array], jax.Array]  # (logits [R, V], temperature [R]) -> [R, V]
    noise: Callable[[jax.Array, jax.Array, int], jax.Array]  # (seed [R], position [R], V) -> [R, V]
    logprobs_at: Callable[[jax.Array, jax.Array], jax.Array]  # (logits [R, V], tokens [R]) -> float32 [R]
    first_kept: Callable[[jax.Array, jax.Array, SamplingArrays], jax.Array]  # see `filters.first_kept`
    narrowed: Callable[[jax.Array, SamplingArrays, jax.Array], jax.Array]  # see `filters.narrowed`
    biased: Callable[[jax.Array, jax.Array], jax.Array]  # (logits [...], bias [...] float32) -> [...]
    # (logits [R, V], seen [R, V], count [R, V], rows) -> [R, V], after repetition, frequency and presence penalty
    penalised: Callable[[jax.Array, jax.Array, jax.Array, SamplingArrays], jax.Array]
    lowest: float | int  # the logit of a token that must not be chosen
    is_random: Callable[[jax.Array], jax.Array]  # temperature [R] -> whether it is above 0
    is_filtered: Callable[[SamplingArrays], jax.Array]  # see `filters.is_filtered`
    has_penalties: Callable[[SamplingArrays], jax.Array]  # rows that `penalised` may change, [R] bool


def numbers_of(logits: jax.Array, numerics: Numerics | None = None) -> Numbers:
    """The functions for logits of this dtype; `numerics` orders the sums of floats, and names who makes noise of integers."""
    if logits.dtype == jnp.int32:
        return INTEGERS if numerics is None else INTEGERS._replace(noise=integer_functions(numerics).gumbel)
    return FLOATS if numerics is None else FLOATS._replace(logprobs_at=partial(logprobs_at, sum_row=sum_fn(numerics)))


def sample(
    logits_f32: jax.Array, position: jax.Array, rows: SamplingArrays, process_fn: ProcessFn | None, *, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """Chooses one token per row, for `R` rows.

    Args:
        logits_f32: `[R, V]`.
        position: `[R]` int32, the absolute position that the chosen token will have.
        rows: sampling parameters of each row, `[R]`.
        process_fn: the riders' function of the logits, see `Riders.process_fn`. None for rows that ask for no more than a
            temperature: then nothing else is in the program.
        numerics: `reductions` orders the sum of the log-probability.

    Returns:
        Tokens `[R]` int32 and their log-probabilities `[R]` float32, of the distribution that the row's `logprobs_mode` names.
        A row with a nan or +inf logit gets nan in all cases.
    """
    numbers = numbers_of(logits_f32, numerics)
    with jax.named_scope("sample"):
        processed = logits_f32 if process_fn is None else process_fn(logits_f32)
        by_kernel = None if logits_f32.dtype == jnp.int32 else operations(numerics).draw
        if by_kernel is None:
            tokens = draw(processed, position, rows, numbers, has_filters=process_fn is not None)
        else:
            tokens = by_kernel(processed, position, rows)
        raw = numbers.logprobs_at(logits_f32, tokens)
        if process_fn is None:
            return tokens, raw

        def report() -> jax.Array:
            scaled = numbers.tempered(processed, rows.temperature)
            asked = numbers.logprobs_at(_asked_logits(logits_f32, scaled, rows), tokens)
            # A bias or a filter may hide a non-finite logit; the request must end with an error nevertheless.
            return jnp.where((rows.logprobs_mode != RAW) & jnp.isfinite(raw), asked, raw)

        return tokens, jax.lax.cond(jnp.any(rows.logprobs_mode != RAW), report, lambda: raw)


def draw(logits: jax.Array, position: jax.Array, rows: SamplingArrays, numbers: Numbers, *, has_filters: bool) -> jax.Array:
    """The tokens `[R]` int32 of processed `logits [R, V]`: temperature, filters, noise, and the largest.

    `has_filters`: whether rows may ask for min_p, top_k or top_p.
    """
    random = numbers.is_random(rows.temperature)

    def perturb(logits: jax.Array) -> jax.Array:
        noise = numbers.noise(rows.seed, position, logits.shape[1])
        return jnp.where(random[:, None], logits + noise, logits)

    scaled = numbers.tempered(logits, rows.temperature)
    chosen_by = jax.lax.cond(jnp.any(random), perturb, lambda logits: logits, scaled)
    if not has_filters:
        return first_largest(chosen_by)
    return jax.lax.cond(
        jnp.any(numbers.is_filtered(rows)),
        lambda: numbers.first_kept(chosen_by, scaled, rows),
        lambda: first_largest(chosen_by),
    )


def choose_fn(riders: Riders, numerics: Numerics) -> ChooseFn:
    """`sample` for rows of a pass: `(logits_f32, position, rows, texts_fn)`, with `rows` as of `Riders.rows`."""

    def choose(
        logits_f32: jax.Array, position: jax.Array, rows: dict[str, Any], texts_fn: TextsFn
    ) -> tuple[jax.Array, jax.Array]:
        process_fn = riders.process_fn(rows, position, texts_fn)
        return sample(logits_f32, position, rows[SAMPLING.name], process_fn, numerics=numerics)

    return choose


def reported_logits(
    logits_f32: jax.Array, position: jax.Array, rows: SamplingArrays, process_fn: ProcessFn | None
) -> jax.Array:
    """The logits `[R, V]` whose log-softmax is reported: at new positions what `logprobs_mode` names, else raw.

    Arguments as for `sample`.
    """
    if process_fn is None:
        return logits_f32
    asked = (rows.logprobs_mode != RAW) & (position >= rows.prompt_len)

    def process(logits: jax.Array) -> jax.Array:
        scaled = numbers_of(logits).tempered(process_fn(logits), rows.temperature)
        return jnp.where(asked[:, None], _asked_logits(logits, scaled, rows), logits)

    return jax.lax.cond(jnp.any(asked), process, lambda logits: logits, logits_f32)


def process_logits(logits_f32: jax.Array, position: jax.Array, rows: SamplingArrays, texts: jax.Array) -> jax.Array:
    """Logits `[R, V]` after, in this order: bias, the ban of stop tokens, repetition, frequency and presence penalty.

    Args:
        logits_f32: as for `sample`, like `position` and `rows`.
        texts: `[X, T]` int32, whole sequences from position 0. `X` divides `R`: the `W = R / X` rows from `x * W` on are
            consecutive choices in text `x`. The choice at position `p` sees the places before `p`. Places from the last
            choice's position on are never read.
    """
    numbers = numbers_of(logits_f32)
    R, V = logits_f32.shape
    W = R // texts.shape[0]
    row = jnp.arange(R, dtype=jnp.int32)[:, None]
    biased = jnp.where(rows.bias_ids == NO_TOKEN, V, rows.bias_ids)  # V is out of range and dropped; -1 would be the last token
    # Not a scatter that adds: on a GPU it leaves the order to threads, and each token of a row has one bias anyway.
    raised = numbers.biased(jnp.take_along_axis(logits_f32, jnp.minimum(biased, V - 1), axis=1), rows.bias_values)
    logits = logits_f32.at[row, biased].set(raised, mode="drop")
    bans = (position < rows.min_len)[:, None] & (rows.stop_ids != NO_TOKEN)
    logits = logits.at[row, jnp.where(bans, rows.stop_ids, V)].set(numbers.lowest, mode="drop")

    first = position[::W]
    prompt_len = rows.prompt_len[::W]
    seen = _counts(texts, jnp.zeros_like(prompt_len), first, W, V) > 0
    count = _counts(texts, prompt_len, first, W, V)
    return numbers.penalised(logits, seen, count, rows)


def _penalised(logits: jax.Array, seen: jax.Array, count: jax.Array, rows: SamplingArrays) -> jax.Array:
    """Float32 `logits [R, V]` after the penalties, for tokens `seen [R, V]` and their `count [R, V]` in what is new."""
    penalty = rows.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    # Compilers may fuse a product with the following sum. Each half of the penalty has 12 bits, so its products with counts
    # up to 4096 are exact, and both ways give the same bits.
    high = jax.lax.bitcast_convert_type(rows.frequency_penalty, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = jax.lax.bitcast_convert_type(high, jnp.float32)
    for half in (high, rows.frequency_penalty - high):
        logits = logits - half[:, None] * count.astype(jnp.float32)
    return logits - jnp.where(count > 0, rows.presence_penalty[:, None], 0.0)


def process_if_asked(shared: Any, rows: Rows, logits_f32: jax.Array) -> jax.Array:
    """`Rider.logits` of `SAMPLING`: runs `process_logits` only if it may change a row."""
    asked: SamplingArrays = rows.state
    penalised = numbers_of(logits_f32).has_penalties(asked)
    changes = penalised | (rows.position < asked.min_len) | (asked.bias_ids != NO_TOKEN).any(-1)

    def process(logits: jax.Array) -> jax.Array:
        return process_logits(logits, rows.position, asked, rows.texts_fn())

    return jax.lax.cond(jnp.any(changes), process, lambda logits: logits, logits_f32)


def _asked_logits(logits_f32: jax.Array, scaled: jax.Array, rows: SamplingArrays) -> jax.Array:
    """The logits `[R, V]` of the distribution that each row's `logprobs_mode` names; `scaled` are processed and tempered."""
    numbers = numbers_of(logits_f32)
    processed = rows.logprobs_mode == PROCESSED
    asked = (rows.logprobs_mode == TEMPERED)[:, None]
    others = jnp.where(asked, numbers.tempered(logits_f32, rows.temperature), logits_f32)
    return jnp.where(processed[:, None], numbers.narrowed(scaled, rows, processed), others)


def _has_penalties(rows: SamplingArrays) -> jax.Array:
    return (rows.repetition_penalty != 1) | (rows.frequency_penalty != 0) | (rows.presence_penalty != 0)


def _counts(texts: jax.Array, start: jax.Array, first: jax.Array, W: int, V: int) -> jax.Array:
    """Counts each token in the text before each choice, from place `start [X]` on: `[X * W, V]` int32.

    Each place is added to the first of the `W` choices that sees it; then counts are summed over choices. Text `a b c ...`,
    `start` 1, first choice at position 2, `W = 3`: place 1 (b) goes to choice 0, place 2 (c) to choice 1, place 3 to choice 2,
    the rest nowhere.
    """
    X, T = texts.shape
    place = jnp.arange(T, dtype=jnp.int32)[None, :]
    choice = jnp.where(place >= start[:, None], jnp.maximum(place - first[:, None] + 1, 0), W)
    text = jnp.arange(X, dtype=jnp.int32)[:, None]
    added = jnp.zeros((X, W, V), jnp.int32).at[text, choice, texts].add(1, mode="drop")
    return jnp.cumsum(added, axis=1, dtype=jnp.int32).reshape(X * W, V)


def tempered(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """`logits [R, V]` over the `temperature [R]`, as they are where that is 0.

    The quotients are worked out apart from what follows: XLA would fuse a factor `1 / temperature` with a following sum.

    A row near 0 gets the limit of low temperatures if one of its quotients is too large for float32: its largest logit is
    certain, all others are as good as excluded. Subtracting the largest before dividing would leave the choice among equals to
    noise, and round the quotients of all other temperatures differently.
    """
    random = temperature > 0

    def scale(logits: jax.Array) -> jax.Array:
        return logits / jnp.where(random, temperature, 1.0)[:, None]

    def bounded(quotients: jax.Array) -> jax.Array:
        is_finite = jnp.isfinite(logits)
        overflows = (is_finite & jnp.isinf(quotients)).any(-1, keepdims=True)
        limit = jnp.where(logits == logits.max(-1, keepdims=True), CERTAIN, jnp.where(is_finite, -CERTAIN, logits))
        return jnp.where(overflows, limit, quotients)

    quotients = jax.lax.cond(jnp.any(random), scale, lambda logits: logits, logits)
    is_near_zero = random & (temperature < NEAR_ZERO)
    return jax.lax.cond(jnp.any(is_near_zero), bounded, lambda quotients: quotients, quotients)


def logprobs_at(logits_f32: jax.Array, tokens: jax.Array, sum_row: SumFn) -> jax.Array:
    """Log-softmax of `logits_f32 [R, V]` at `tokens [R]`."""
    largest = logits_f32.max(-1)
    log_sum = jnp.log(sum_row(jnp.exp(logits_f32 - largest[:, None])))
    return jnp.take_along_axis(logits_f32, tokens[:, None], axis=1)[:, 0] - largest - log_sum


def logprobs_with_derivative(sum_row: SumFn) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`logprobs_at` of `logits_f32 [R, V]` at `tokens [R]`, with its derivative, in which no sum is left to autodiff."""

    @jax.custom_vjp
    def found(logits_f32: jax.Array, tokens: jax.Array) -> jax.Array:
        return logprobs_at(logits_f32, tokens, sum_row)

    def backward(given: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
        logits_f32, tokens = given
        is_token = jnp.arange(logits_f32.shape[1], dtype=jnp.int32)[None, :] == tokens[:, None]
        return (is_token.astype(jnp.float32) - jax.nn.softmax(logits_f32, axis=-1)) * cotangent[:, None], None

    found.defvjp(lambda logits_f32, tokens: (found(logits_f32, tokens), (logits_f32, tokens)), backward)
    return found


def likeliest(logits: jax.Array, number: int) -> jax.Array:
    """The `number` largest of each row of `logits [R, V]`, `[R, number]` int32, the lower one first among equals.

    The first is the one that a greedy choice takes, whatever `number` is; XLA:CPU finds it much faster than `top_k` does.
    """
    first = first_largest(logits)[:, None]
    if number < 2:
        return first[:, :number]
    zero = jnp.zeros((), logits.dtype)
    _, ids = jax.lax.top_k(jnp.where(logits == 0, zero, logits), number)  # it would put -0.0 after 0.0
    return jnp.concatenate([first, ids[:, 1:].astype(jnp.int32)], axis=1)


def _integer_logprobs_at(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probabilities of fixed logits as float32, exact; nan in a row that has left its range."""
    found = integer_choices.as_float32(integer_choices.logprobs(logits, tokens))
    return jnp.where(logits.max(-1) >= LIMIT, jnp.float32(jnp.nan), found)


def _integer_first_kept(chosen_by: jax.Array, scaled: jax.Array, rows: SamplingArrays) -> jax.Array:
    floor = integer_choices.kept_from(scaled, rows)
    return first_largest(jnp.where(scaled >= floor[:, None], chosen_by, -(2**31)))


def _integer_narrowed(scaled: jax.Array, rows: SamplingArrays, asked: jax.Array) -> jax.Array:
    floor = jnp.where(asked, integer_choices.kept_from(scaled, rows), -LIMIT)
    return jnp.where(scaled >= floor[:, None], scaled, -LIMIT)


FLOATS = Numbers(
    tempered=lambda logits, temperature: tempered(logits, temperature),
    noise=gumbel,
    logprobs_at=lambda logits, tokens: logprobs_at(logits, tokens, fixed_sum),
    first_kept=first_kept,
    narrowed=narrowed,
    biased=jnp.add,
    penalised=_penalised,
    lowest=-jnp.inf,
    is_random=lambda temperature: temperature > 0,
    is_filtered=is_filtered,
    has_penalties=_has_penalties,
)
INTEGERS = Numbers(
    tempered=integer_choices.tempered,
    noise=integer_choices.gumbel,
    logprobs_at=_integer_logprobs_at,
    first_kept=_integer_first_kept,
    narrowed=_integer_narrowed,
    biased=integer_choices.biased,
    penalised=integer_choices.penalised,
    lowest=-LIMIT,
    is_random=integer_choices.is_positive,
    is_filtered=integer_choices.is_filtered,
    has_penalties=integer_choices.has_penalties,
)


def _init(cfg: ModelConfig, capacity: Capacity) -> SamplingArrays:
    idle = [SamplingParams()] * capacity.num_sequences
    arrays = sampling_arrays(idle, max_stop_ids=capacity.max_stop_ids, max_logit_bias=capacity.max_logit_bias)
    return jax.device_put(arrays)


def _pack(like: SamplingArrays, entries: Sequence[Entry], eos_ids: Sequence[int]) -> SamplingArrays:
    return sampling_arrays(
        [entry.sampling for entry in entries],
        [len(entry.prompt) for entry in entries],
        eos_ids=eos_ids,
        max_stop_ids=like.max_stop_ids,
        max_logit_bias=like.max_logit_bias,
    )


# Bias, minimum length and penalties work on logits as any rider does; temperature, filters and noise are `sample` itself.
SAMPLING = Rider("sampling", init=_init, pack=_pack, logits=process_if_asked)
