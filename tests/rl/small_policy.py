"""A policy over a model so small that its programs compile in seconds, and rollouts by hand."""

import dataclasses
from collections.abc import Sequence
from functools import cache

import numpy as np
import optax

import detspec.rl as rl
from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.rl.rollouts import Rollout
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import BYTE_CFG, byte_params

CFG = dataclasses.replace(BYTE_CFG, max_position=48)  # fewer positions than a leaf of short texts would have
SAMPLING = SamplingParams(max_tokens=14, temperature=0.9)
PROMPTS = ([5, 17, 9], [2, 11])


@cache
def small_model() -> Model:
    return Model(CFG, byte_params(), None, (), "digest")


def make_policy(*, run: str = "run", leaf: int = 4, chips: int = 1, **engine) -> rl.Policy:
    config = EngineConfig(**{"max_requests": 8, "max_len": 48, "method": "none", **engine})
    return rl.Policy(small_model(), config, optimizer=optax.adam(1e-2), leaf=leaf, chips=chips, run=run)


def some_rollouts(number: int = 2, version: str = "run:0", **changes) -> list[Rollout]:
    """A group of rollouts by hand."""
    return [
        dataclasses.replace(
            Rollout(
                id=f"0/0/{i}",
                prompt_token_ids=(1, 2),
                token_ids=(3, 4, 5),
                logprobs=np.full(3, -1.0, np.float32),
                text="",
                finish_reason="length",
                sampling=dataclasses.replace(SAMPLING, seed=i, logprobs_mode="tempered"),
                version=version,
            ),
            **changes,
        )
        for i in range(number)
    ]


def with_sampling(group: Sequence[Rollout], **changes) -> list[Rollout]:
    return [dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, **changes)) for each in group]


def rewards_of(groups: Sequence[Sequence[Rollout]]) -> list[list[float]]:
    """How many of a text's tokens are even."""
    return [[float(sum(token % 2 == 0 for token in each.token_ids)) for each in group] for group in groups]
