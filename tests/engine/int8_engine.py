"""Engines of a small model with weights, or keys and values, in int8."""

import dataclasses

import numpy as np

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.fakes import RANDOM_CFG, random_model

FULL = dataclasses.replace(RANDOM_CFG, tie_embeddings=True)
INT8 = dataclasses.replace(FULL, weights="int8")
PROMPTS = [np.random.default_rng(i).integers(0, FULL.vocab_size, 7 + 5 * i).tolist() for i in range(3)]


def engine_of(
    cfg: ModelConfig, *, method: str = "none", max_requests: int = 3, num_pages: int | None = None, **numerics
) -> Engine:
    """An engine with room for requests of 64 tokens, by the CPU kernels unless `numerics` say otherwise."""
    how = {"implementation": "cpu", "linear": "pinned", "cache_dtype": "bfloat16", **numerics}
    config = EngineConfig(
        max_requests=max_requests,
        max_len=64,
        num_pages=num_pages,
        method=method,
        num_speculative_tokens=3,
        schedule=Schedule(Numerics(page=16, **how), Budget(16, 4)),
        compile_cache=False,
    )
    params = random_model(cfg)
    return Engine(Model(cfg, params, None, (), digest_model(cfg, params)), config)


def texts(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[tuple]:
    """Tokens and log-probability bits of up to three completions, greedy and sampled."""
    sampling = [SamplingParams(max_tokens=20, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 1.0, 0.7)]
    found = engine.generate(prompts, sampling[: len(prompts)])
    return [(one.token_ids, np.asarray(one.logprobs, np.float32).tobytes()) for one in found]
