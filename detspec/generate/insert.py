"""States without rows, and putting requests into rows."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import init_cache
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.generate.packing import pack_rows, unpack_rows
from detspec.model.params import Params
from detspec.sampling_params import SamplingParams, all_stop_ids, row_sampling
from detspec.schedule import Schedule
from detspec.state import PAD_ID, RUNNING, GenState, RowSampling, init_counters
from detspec.thinking.think_prompt import init_reading
from detspec.thinking.thoughts import pack_guesses

Array = jax.Array | np.ndarray


def init_state(
    cfg: ModelConfig,
    *,
    max_requests: int,
    max_len: int,
    max_stop_ids: int,
    max_logit_bias: int,
    schedule: Schedule,
    num_pages: int | None = None,
) -> GenState:
    """A state of `max_requests` rows, none of them live.

    Each has room for `max_len` positions, `max_stop_ids` stop tokens and `max_logit_bias` biased tokens, and pages of its
    own unless `num_pages` says how many there are to hand out, see `init_cache`.

    Raises:
        InputError: a window of the schedule is longer than `max_len`, or a model that thinks cannot with this schedule, see
            `init_reading`.
    """
    if schedule.budget.window > max_len:
        raise InputError(
            f"Budget.window ({schedule.budget.window}) is more than the cache's max_len ({max_len}): lower one, raise the other"
        )
    nobody = row_sampling([SamplingParams()] * max_requests, max_stop_ids=max_stop_ids, max_logit_bias=max_logit_bias)
    return GenState(
        tokens=jnp.full((max_requests, max_len), PAD_ID, jnp.int32),
        logprobs=jnp.zeros((max_requests, max_len), jnp.float32),
        committed=jnp.ones(max_requests, jnp.int32),
        limit=jnp.ones(max_requests, jnp.int32),
        live=jnp.zeros(max_requests, bool),
        finish=jnp.full(max_requests, RUNNING, jnp.int32),
        deterministic=jnp.ones(max_requests, bool),
        sampling=jax.tree.map(jnp.asarray, nobody),
        counters=init_counters(max_requests),
        cache=init_cache(cfg, max_requests=max_requests, max_len=max_len, numerics=schedule.numerics, num_pages=num_pages),
        reading=init_reading(cfg, max_requests=max_requests, max_len=max_len, schedule=schedule) if cfg.thinking else None,
    )


def commit_like(params: Params, state: GenState) -> GenState:
    """`state` bound to the device that `params` are bound to, if it is a single one; else as it is.

    A program of arrays that are bound to a device is not the one of arrays that are not, and what a program returns is bound
    as its parameters are: the second use of each program would compile it again.
    """
    leaf = jax.tree.leaves(params)[0]
    is_bound = leaf.committed and isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding)
    return jax.device_put(state, leaf.sharding) if is_bound else state


def start_state(
    cfg: ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    eos_ids: Sequence[int],
    max_len: int,
    schedule: Schedule,
) -> GenState:
    """The state of `B = len(prompts)` live rows: prompts checked and committed, nothing in the cache."""
    for prompt, params in zip(prompts, sampling, strict=True):
        check_prompt(prompt, params, cfg, max_len=max_len)
    max_stop_ids = max([1, *(len(all_stop_ids(params, eos_ids)) for params in sampling)])
    max_logit_bias = max([1, *(len(params.logit_bias) for params in sampling)])
    state = init_state(
        cfg,
        max_requests=len(prompts),
        max_len=max_len,
        max_stop_ids=max_stop_ids,
        max_logit_bias=max_logit_bias,
        schedule=schedule,
    )
    return insert(state, pack_requests(state, range(len(prompts)), prompts, sampling, eos_ids))


def check_prompt(prompt: Sequence[int], sampling: SamplingParams, cfg: ModelConfig, *, max_len: int) -> None:
    """Raises `InputError` if `prompt` is empty, it or the bias holds ids outside the vocabulary, or new tokens do not fit."""
    if len(prompt) == 0:
        raise InputError("the prompt is empty: give at least one token")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < cfg.vocab_size:
            raise InputError(f"the prompt holds token id {token!r}; accepted are integers in 0 .. {cfg.vocab_size - 1}")
    for token, _ in sampling.logit_bias:
        if token >= cfg.vocab_size:
            raise InputError(f"logit_bias names token id {token}; accepted are integers in 0 .. {cfg.vocab_size - 1}")
    if sampling.thinking and cfg.thinking is None:
        raise InputError("sampling parameter thinking is true, but the model has no thinker and no compressor")
    if thinks(cfg, sampling) and sampling.prompt_logprobs is not None:
        raise InputError(
            "prompt_logprobs are not reported of prompts that are read thinking: leave them out, or set thinking false"
        )
    if len(prompt) + sampling.max_tokens > max_len:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}, together more than the cache's "
            f"max_len of {max_len}: shorten one or raise max_len"
        )


def thinks(cfg: ModelConfig, sampling: SamplingParams) -> bool:
    """Whether the prompt of such a request is read thinking."""
    return cfg.thinking is not None and sampling.thinking is not False


class Requests(flax.struct.PyTreeNode):
    """Requests for some of `B` rows, in two arrays, so that programs take them fast."""

    chosen: Array  # [B] bool, rows that get one
    packed: Array  # [B, X] int32, `_Asked` of each row


class _Asked(flax.struct.PyTreeNode):
    """What a row is given by its request; fields as in `GenState`, `length` as in its cache."""

    tokens: Array
    logprobs: Array
    committed: Array
    length: Array
    limit: Array
    deterministic: Array
    sampling: RowSampling
    thoughts: Array | None = None  # guesses
    end: Array | None = None


def pack_requests(
    state: GenState,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    eos_ids: Sequence[int],
    *,
    prompt_lens: Sequence[int] | None = None,
    logprobs: Sequence[Sequence[float]] | None = None,
    lengths: Sequence[int] | None = None,
    thoughts: Sequence[Sequence[Sequence[int]]] | None = None,
) -> Requests:
    """Checked requests for `rows` of states like `state`.

    A request that was taken out half way goes on where it stopped if its new tokens so far are put in with its prompt.

    Args:
        state: its shapes are read, nothing else.
        rows: one for each request, all different.
        prompts: token ids to commit.
        sampling: of each request.
        eos_ids: the model's end-of-sequence tokens.
        prompt_lens: how many tokens of each of `prompts` are its prompt, the rest being new tokens; all if None. New tokens
            are counted from there.
        logprobs: of each request, the log-probabilities of the new tokens among `prompts`; 0 if None.
        lengths: how many positions of each request its pages hold already, less than it has tokens; none if None.
        thoughts: of each request, guesses of the thoughts after its first chunks; those after others are guessed to be
            trivial. For states of models that think.
    """
    max_requests, max_len = state.tokens.shape
    number = len(prompts)
    prompt_len = np.asarray([len(prompt) for prompt in prompts] if prompt_lens is None else prompt_lens, np.int32)
    tokens = np.full((number, max_len), PAD_ID, np.int32)
    known_logprobs = np.zeros((number, max_len), np.float32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        if logprobs is not None:
            known_logprobs[i, prompt_len[i] : len(prompt)] = logprobs[i]
    asked = _Asked(
        tokens=tokens,
        logprobs=known_logprobs,
        committed=np.asarray([len(prompt) for prompt in prompts], np.int32),
        length=np.zeros(number, np.int32) if lengths is None else np.asarray(lengths, np.int32),
        limit=prompt_len + np.asarray([params.max_tokens for params in sampling], np.int32),
        deterministic=np.asarray([params.deterministic for params in sampling], bool),
        sampling=row_sampling(
            sampling,
            prompt_len.tolist(),
            eos_ids=eos_ids,
            max_stop_ids=state.sampling.stop_ids.shape[1],
            max_logit_bias=state.sampling.bias_ids.shape[1],
        ),
    )
    if state.reading is not None:
        reads_plainly = np.asarray([params.thinking is False for params in sampling], bool)
        end = np.where(reads_plainly, 0, (prompt_len - 1) // state.reading.chunk)
        guesses = pack_guesses(state.reading, [()] * number if thoughts is None else thoughts)
        asked = asked.replace(thoughts=guesses, end=end.astype(np.int32))
    chosen = np.zeros(max_requests, bool)
    chosen[list(rows)] = True
    return Requests(chosen=chosen, packed=pack_rows(asked, rows, max_requests))


def no_requests(state: GenState) -> Requests:
    """Requests for no row, on the device."""
    return jax.tree.map(jnp.asarray, pack_requests(state, (), (), (), ()))


def put_requests(state: GenState, requests: Requests) -> GenState:
    """`state` with `requests` in their rows: prompts committed, counters at zero."""
    chosen = jnp.asarray(requests.chosen)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

    reading = state.reading
    before = _Asked(
        *(state.tokens, state.logprobs, state.committed, state.cache.length, state.limit, state.deterministic, state.sampling),
        *((None, None) if reading is None else (reading.thoughts, reading.end)),
    )
    after = jax.tree.map(put, before, unpack_rows(jnp.asarray(requests.packed), before))
    if reading is not None:
        nothing = jax.tree.map(jnp.zeros_like, reading.replace(thoughts=None, end=None))
        unread = jax.tree.map(put, reading.replace(thoughts=None, end=None), nothing)
        reading = unread.replace(thoughts=after.thoughts, end=after.end)
    return state.replace(
        tokens=after.tokens,
        logprobs=after.logprobs,
        committed=after.committed,
        limit=after.limit,
        live=state.live | chosen,
        finish=put(state.finish, jnp.full_like(state.finish, RUNNING)),
        deterministic=after.deterministic,
        sampling=after.sampling,
        counters=jax.tree.map(put, state.counters, init_counters(chosen.shape[0])),
        cache=state.cache.replace(length=after.length),
        reading=reading,
    )


insert = jax.jit(put_requests, donate_argnames=("state",))


def take_rows(state: GenState, rows: jax.Array) -> GenState:
    """The state of `rows [b]` alone, over the same page pools."""
    pools = state.cache
    small = state.replace(cache=pools.replace(k=(), v=()))
    small = jax.tree.map(lambda x: x[rows], small)
    return small.replace(cache=small.cache.replace(k=pools.k, v=pools.v))


def put_rows(state: GenState, rows: jax.Array, part: GenState) -> GenState:
    """`state` with `rows [b]`, all different, replaced by `part`'s, and `part`'s page pools."""
    pools = part.cache
    old, new = state.replace(cache=state.cache.replace(k=(), v=())), part.replace(cache=pools.replace(k=(), v=()))
    joined = jax.tree.map(lambda x, y: x.at[rows].set(y), old, new)
    return joined.replace(cache=joined.cache.replace(k=pools.k, v=pools.v))
