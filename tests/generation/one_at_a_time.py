"""The plainest way to generate, which other ways are compared with, and requests and drafts for the comparisons.

No other request in the batch, one token per window, no draft.
"""

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import KV, Int8Pages, Pages
from detspec.draft.source import DraftParams
from detspec.sampling_params import SamplingParams
from detspec.state import GenState
from tests.fakes import RANDOM_CFG, Request, bits, generate_drafted, random_model, recorded, state_of
from tests.shelf import MANY, Shape

MAX_NEW = 24
V = RANDOM_CFG.vocab_size

# Sizes that kernels take; they run in Pallas's interpreter.
KERNELS = {
    "pallas_tpu": {"implementation": "pallas_tpu", "interpret": True, "cache_dtype": "bfloat16"},
    "pallas_gpu": {"implementation": "pallas_gpu", "interpret": True, "cache_dtype": "bfloat16", "page": 64},
    "reference in int8": {"cache_dtype": "int8"},
}

# What reads the text before each choice, so that it must not see a rejected draft.
PROCESSING = (
    {},
    {},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.7, "presence_penalty": -0.3, "min_tokens": 6},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.9, "logit_bias": {9: 4.0, 18: 3.5, V - 1: -2.0}},
)

FIXED = tuple(
    Request(tuple(np.random.default_rng(i).integers(0, V, 1 + 3 * i).tolist()), SamplingParams(max_tokens=MAX_NEW, **extra))
    for i, extra in enumerate(
        [
            {},
            {"temperature": 0.7, "seed": 3},
            {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 4},
            {},
            {"temperature": 1.0, "top_k": 1, "seed": 5},
        ]
    )
)


def one_at_a_time(request: Request, shape: Shape = MANY) -> tuple:
    """The reference for `request` in a batch of `shape`.

    Aligned bits depend on the window, so there only the draft and the neighbours are taken away; their places stay empty.
    """
    aligned = shape.schedule.numerics.alignment == "window"
    return _one_at_a_time(request, shape if aligned else shape.alone, "recorded" if aligned else "none")


@cache
def _one_at_a_time(request: Request, shape: Shape, source: str) -> tuple:
    return results(generate_all(shape, [request], source=source))[0]


def generate_all(
    shape: Shape, requests, *, source: str, told=None, spoil=lambda state: state, wide_cost: float | None = None
) -> GenState:
    """The final state of `requests`, drafts read from `told`; `spoil` may change the state before the start."""
    state = spoil(state_of(shape, requests))
    told = recorded(shape) if told is None else told
    cost = None if wide_cost is None else np.float32(wide_cost)
    return generate_drafted(random_model(shape.cfg), shape, state, told, np.int32(shape.length), source=source, wide_cost=cost)


def results(state: GenState) -> list[tuple]:
    """Results of each row: committed tokens, the bits of their log-probabilities, why it ended."""
    tokens, logprobs, committed, finish = jax.device_get((state.tokens, state.logprobs, state.committed, state.finish))
    return [
        (tuple(tokens[b, :n].tolist()), tuple(bits(logprobs[b, :n]).tolist()), int(finish[b])) for b, n in enumerate(committed)
    ]


def believed(kind: str, shape: Shape, request: Request, rng: np.random.Generator) -> list[int]:
    """Text of `request` as a draft source of that kind believes it to be."""
    answer = one_at_a_time(request, shape)[0]
    if kind == "perfect":
        return list(answer)
    if kind == "empty":
        return []
    if kind == "random":
        return rng.integers(0, V, shape.length).tolist()
    padded = np.zeros(shape.length, np.int32)
    padded[: len(answer)] = answer
    if kind == "wrong":
        return ((padded + 1) % V).tolist()
    flipped = rng.random(shape.length) < 0.3
    flipped[: len(request.prompt)] = False
    told = np.where(flipped, (padded + 7) % V, padded).tolist()
    return told if kind == "partly right to the end" else told[: rng.integers(len(request.prompt), shape.length + 1)]


def partly_right(shape: Shape, requests: Sequence[Request]) -> DraftParams:
    """Drafts that are wrong now and then, to the end of each text."""
    each = [believed("partly right to the end", shape, r, np.random.default_rng(i)) for i, r in enumerate(requests)]
    return recorded(shape, each)


def scatter_and_poison(state: GenState, rng: np.random.Generator, poison: bool) -> GenState:
    """Hands the pages out in another order, and leaves large numbers in every slot."""
    pages = state.cache.page_table.size
    table = 1 + rng.permutation(pages).reshape(state.cache.page_table.shape).astype(np.int32)
    cache = state.cache.replace(page_table=jnp.asarray(table))
    if poison:
        cache = cache.replace(pools=poisoned(cache.pools, rng))
    return state.replace(cache=cache)


def poisoned(pools: tuple[KV, ...], rng: np.random.Generator) -> tuple[KV, ...]:
    """Finite numbers of both signs and all sizes up to 1e30 in place of all keys and values."""
    keys, values = (_poisoned(each, rng) for each in zip(*pools, strict=True))
    return tuple(map(KV, keys, values))


def _poisoned(pools: tuple[Pages, ...], rng: np.random.Generator) -> tuple[Pages, ...]:
    if isinstance(pools[0], Int8Pages):
        values = rng.integers(-127, 128, pools[0].values.shape, np.int8)
        return tuple(Int8Pages(jnp.array(values), scale) for scale in _poisoned(tuple(pool.scale for pool in pools), rng))
    magnitude = rng.uniform(-3, 30, pools[0].shape)
    noise = (rng.choice([-1.0, 1.0], pools[0].shape) * 10.0**magnitude).astype(np.float32)
    return tuple(jnp.asarray(noise).astype(pool.dtype) for pool in pools)
