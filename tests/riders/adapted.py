"""Requests for a model of two layers that bring an adapter or none, and engines that take it."""

from collections.abc import Sequence
from functools import cache

import jax

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion, Request
from detspec.model.dense import with_fields
from detspec.model.params import init_params
from detspec.riders.rider import Rider
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import BYTE_CFG, SCHEDULE, some_prompts

CFG = with_fields(BYTE_CFG, num_layers=2)  # keys and values of the second layer depend on what the first one adapts
BROUGHT = ("letters", None, "memos", "letters", None, "memos")


@cache
def plain_model() -> Model:
    params = init_params(CFG, jax.random.key(1))
    return Model(CFG, params, None, (), digest_model(CFG, params))


def engine_of(method: str, riders: Sequence[Rider], model: Model | None = None) -> Engine:
    """Four places and pages for two of them, so that sequences are preempted half way; all engines share programs."""
    config = EngineConfig(max_requests=4, max_len=64, method=method, num_pages=8, num_speculative_tokens=3, schedule=SCHEDULE)
    return Engine(model or plain_model(), config, riders=riders)


def requests(brought: Sequence[str | None] = BROUGHT) -> list[Request]:
    """Greedy and sampled ones of 30 tokens."""
    return [
        Request(
            str(i),
            tuple(prompt),
            SamplingParams(max_tokens=30, temperature=(0.0, 0.8)[i % 2], seed=i),
            brings={} if name is None else {"adapter": name},
        )
        for i, (prompt, name) in enumerate(zip(some_prompts(len(brought)), brought, strict=True))
    ]


def run(engine: Engine, asked: Sequence[Request]) -> list[Completion]:
    return sorted(engine.run(asked), key=lambda completion: int(completion.id))
