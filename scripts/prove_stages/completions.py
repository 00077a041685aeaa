"""One prompt, completed many times among changing neighbours: one result if it is deterministic, several as the control."""

import dataclasses
from collections.abc import Iterator
from functools import cache

import numpy as np

from detspec.bench.bench import bench_prompts, random_model
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs, needed_plans
from detspec.engine.request import Completion, Request
from detspec.sampling_params import SamplingParams
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting, engine_programs

WAVES = (1, 3, 31, 31)  # copies that start together; each wave is drained, so the batch shrinks to its last request
LEAST_OF_CONTROL = 2.0
NEIGHBOURS = 0.5  # for each copy
SAMPLING = SamplingParams(temperature=1.0, seed=7, ignore_eos=True)


def programs(setting: Setting) -> Iterator[Program]:
    """All programs of the engine, for any traffic."""
    config = dataclasses.replace(config_of(setting), schedule=setting.schedule_fn(setting.size.model))
    needs = Needs(deterministic=True, ordinary=True, processing=False)
    plans = needed_plans(config, config.schedule, config.max_requests + 1, needs)
    yield from engine_programs(setting.size.model, config, plans, name="completions")


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Deterministic, then the control."""

    @cache
    def model_and_engine() -> tuple[Model, Engine]:
        model = random_model(setting.size.model)
        engine = Engine(model, config_of(setting))
        engine.prepare(needs=Needs(deterministic=True, ordinary=True, processing=False))
        return model, engine

    for deterministic in (True, False):
        name = "deterministic" if deterministic else "ordinary, the control"
        yield Measurement(
            name, lambda deterministic=deterministic, name=name: count(setting, *model_and_engine(), deterministic, name)
        )


def count(setting: Setting, model: Model, engine: Engine, deterministic: bool, name: str) -> Iterator[Entry]:
    """How many different tokens and log-probability bits the completions have."""
    size = setting.size
    sampling = dataclasses.replace(SAMPLING, max_tokens=size.new_tokens // 4, deterministic=deterministic)
    prompts = bench_prompts(model, 64, size.prompt_len)
    rng = np.random.default_rng(0)
    results: dict[bytes, int] = {}
    number = 0
    while number < size.copies:
        for wave in WAVES:
            for completion in engine.run(mixed_wave(prompts, sampling, min(wave, size.copies - number), rng)):
                if completion.id == "copy":
                    number += 1
                    key = bits_of(completion)
                    results[key] = results.get(key, 0) + 1
    most = max(results.values())
    note = f"of {number}; the most frequent one {most} times"
    if deterministic:
        yield Entry(f"{name}: different results", float(len(results)), "", 1.0, True, note=note)
    else:
        bar = None if setting.platform == "cpu" else LEAST_OF_CONTROL  # on CPUs, both paths run the same kernels
        yield Entry(f"{name}: different results", float(len(results)), "", bar, note=note)


def mixed_wave(
    prompts: list[tuple[int, ...]], sampling: SamplingParams, copies: int, rng: np.random.Generator
) -> list[Request]:
    """Copies of the first prompt, and neighbours with other prompts and lengths, in random order."""
    requests = [Request("copy", prompts[0], sampling) for _ in range(copies)]
    for index in range(int(np.ceil(NEIGHBOURS * copies)) if copies else 0):
        length = int(rng.integers(1, len(prompts[0])))
        tokens = int(rng.integers(1, 2 * sampling.max_tokens))
        other = dataclasses.replace(sampling, max_tokens=tokens, seed=int(rng.integers(1000)), deterministic=bool(index % 2))
        requests.append(Request("neighbour", prompts[1 + index % (len(prompts) - 1)][:length], other))
    return [requests[index] for index in rng.permutation(len(requests))]


def bits_of(completion: Completion) -> bytes:
    """Tokens and log-probabilities as bytes."""
    return np.asarray(completion.token_ids, np.int32).tobytes() + np.asarray(completion.logprobs, np.float32).tobytes()


def config_of(setting: Setting) -> EngineConfig:
    """Room for the largest wave and its neighbours."""
    size = setting.size
    return EngineConfig(max_requests=size.requests, max_len=size.prompt_len + size.new_tokens, method="none")
