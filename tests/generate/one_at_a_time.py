"""The plainest way to generate, which other ways are compared with, and requests and guesses for the comparisons.

Nobody else in the batch, one token per window, no draft.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import GenState
from tests.fakes import RANDOM_CFG, Request, bits, generate_drafted, random_model, state_of

MAX_LEN = 48
MAX_NEW = 24
PAGE = 16
BF16, F32 = RANDOM_CFG, dataclasses.replace(RANDOM_CFG, dtype="float32")
V = RANDOM_CFG.vocab_size

# Sizes that kernels take.
KERNELS = {
    "pallas_tpu": {"interpret": True, "cache_dtype": "bfloat16"},
    "pallas_gpu": {"interpret": True, "cache_dtype": "bfloat16", "page": 64},
}

# What reads the text before each choice, so that it must not see a refused guess.
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


@cache
def one_at_a_time(
    request: Request,
    rows: int = 64,
    cfg: ModelConfig = BF16,
    aligned_window: int | None = None,
    implementation: str = "reference",
) -> tuple:
    """The reference. Aligned bits depend on the window, so there only the draft and the neighbours are taken away."""
    if aligned_window is None:
        schedule = make_schedule(rows, 1, implementation=implementation)
        return results(generate_all([request], schedule=schedule, source="none", cfg=cfg))[0]
    schedule = make_schedule(rows, aligned_window, "window")
    return results(generate_all([request], schedule=schedule, source="recorded", cfg=cfg))[0]


def generate_all(requests, *, schedule: Schedule, source: str, cfg=BF16, recorded=None, spoil=lambda state: state) -> GenState:
    """The final state of `requests`, whose cache `spoil` may change before the start."""
    B = len(requests)
    recorded = (np.zeros((B, MAX_LEN), np.int32), np.zeros(B, np.int32)) if recorded is None else recorded
    state = spoil(state_of(cfg, requests, schedule=schedule, max_len=MAX_LEN))
    return generate_drafted(random_model(cfg), cfg, state, recorded, np.int32(MAX_LEN), schedule=schedule, source=source)


def make_schedule(rows: int, window: int, alignment: str = "free", implementation: str = "reference") -> Schedule:
    """Kernels run in Pallas's interpreter."""
    schedule = Schedule(Numerics(page=PAGE, alignment=alignment, implementation=implementation), Budget(rows, window))
    return schedule.with_numerics(**KERNELS.get(implementation, {}))


def results(state: GenState) -> list[tuple]:
    """Of each row: committed tokens, the bits of their log-probabilities, why it ended."""
    tokens, logprobs, committed, finish = jax.device_get((state.tokens, state.logprobs, state.committed, state.finish))
    return [
        (tuple(tokens[b, :n].tolist()), tuple(bits(logprobs[b, :n]).tolist()), int(finish[b])) for b, n in enumerate(committed)
    ]


def guesses(kind: str, request: Request, answer: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """What a draft source of that kind believes the text of `request` to be: `[MAX_LEN]` tokens and how many are in use."""
    told = np.zeros(MAX_LEN, np.int32)
    told[: len(answer)] = answer
    if kind == "perfect":
        return told, len(answer)
    if kind == "empty":
        return told, 0
    if kind == "wrong":
        return (told + 1) % V, MAX_LEN
    if kind == "random":
        return rng.integers(0, V, MAX_LEN, dtype=np.int32), MAX_LEN
    flipped = rng.random(MAX_LEN) < 0.3
    flipped[: len(request.prompt)] = False
    return np.where(flipped, (told + 7) % V, told), int(rng.integers(len(request.prompt), MAX_LEN + 1))


def partly_right(requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray]:
    """What a draft source believes that is wrong now and then: `[B, MAX_LEN]` tokens, all in use."""
    told = [guesses("partly right", r, one_at_a_time(r)[0], np.random.default_rng(i))[0] for i, r in enumerate(requests)]
    return np.stack(told), np.full(len(told), MAX_LEN, np.int32)


def poisoned(pools: tuple[jax.Array, ...], rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Finite numbers of both signs and all sizes up to 1e30."""
    magnitude = rng.uniform(-3, 30, pools[0].shape)
    noise = (rng.choice([-1.0, 1.0], pools[0].shape) * 10.0**magnitude).astype(np.float32)
    return tuple(jnp.asarray(noise).astype(pool.dtype) for pool in pools)
