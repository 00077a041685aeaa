"""Completes one prompt many times among changing neighbours: one result if it is deterministic, several as the control."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np

from detspec.bench.bench import bench_prompts, random_model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs, Plan, needed_plans
from detspec.engine.request import Completion, Request
from detspec.sampling_params import SamplingParams
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting, engine_programs

WAVES = (1, 3, 31, 31)  # copies that start together; each wave is drained, so the batch shrinks to its last request
LEAST_OF_CONTROL = 2.0
OF_CONTROL = 1 / 4  # completions of the control, for each deterministic one
NEIGHBOURS = 0.5  # for each copy; a single one is alone, in the smallest batch
NEEDS = Needs(deterministic=True, ordinary=True, processing=False)  # both kinds; none asks for more than a temperature
SAMPLING = SamplingParams(temperature=1.0, seed=7, ignore_eos=True)


def programs(setting: Setting) -> Iterator[Program]:
    """All programs of the engine."""
    config = config_of(setting)
    yield from engine_programs(setting.size.model, config, plans_of(setting, config), name="completions")


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Yields one, so that either kind has been counted whenever it is cut off."""
    yield Measurement("completions", lambda: count(setting))


def count(setting: Setting) -> Iterator[Entry]:
    """Counts different tokens and log-probability bits of the completions, after each wave; the control's turn is first."""
    size = setting.size
    model = random_model(size.model)
    engine = Engine(model, config_of(setting))
    engine.device.start_compiling(plans_of(setting, engine.config), apart=True)  # all at the same time
    for requests in batches(engine.config):
        engine.prepare(requests, NEEDS)
    prompts = bench_prompts(model, 64, size.completed_prompt)
    rng = np.random.default_rng(0)
    wanted = {False: max(1, int(OF_CONTROL * size.copies)), True: size.copies}
    results: dict[bool, Counter[bytes]] = {False: Counter(), True: Counter()}
    while left := {kind: wanted[kind] - found.total() for kind, found in results.items() if found.total() < wanted[kind]}:
        for kind in left:
            sampling = dataclasses.replace(SAMPLING, max_tokens=size.new_tokens // 4, deterministic=kind)
            for wave in WAVES:
                copies = min(wave, wanted[kind] - results[kind].total())
                found = engine.run(mixed_wave(prompts, sampling, copies, rng))
                results[kind].update(bits_of(completion) for completion in found if completion.id == "copy")
                yield counted(setting, results[kind], wanted[kind], deterministic=kind)


def counted(setting: Setting, results: Counter[bytes], wanted: int, *, deterministic: bool) -> Entry:
    """The figure of one kind, so far."""
    so_far = "" if results.total() == wanted else " so far"
    note = f"of {results.total()}{so_far}; the most frequent one {max(results.values())} times"
    number = float(len(results))
    if deterministic:
        return Entry("completions, deterministic: different results", number, "", 1.0, True, note=note, predicted=1.0)
    bar = None if setting.platform == "cpu" else LEAST_OF_CONTROL  # on CPUs, both paths run the same kernels
    return Entry("completions, ordinary: different results", number, "", bar, note=note)


def mixed_wave(
    prompts: list[tuple[int, ...]], sampling: SamplingParams, copies: int, rng: np.random.Generator
) -> list[Request]:
    """Copies of the first prompt, and neighbours with other prompts and lengths, in random order."""
    requests = [Request("copy", prompts[0], sampling) for _ in range(copies)]
    for index in range(int(NEIGHBOURS * copies)):
        length = int(rng.integers(1, len(prompts[0])))
        tokens = int(rng.integers(1, 2 * sampling.max_tokens))
        other = dataclasses.replace(sampling, max_tokens=tokens, seed=int(rng.integers(1000)), deterministic=bool(index % 2))
        requests.append(Request("neighbour", prompts[1 + index % (len(prompts) - 1)][:length], other))
    return [requests[index] for index in rng.permutation(len(requests))]


def bits_of(completion: Completion) -> bytes:
    """Tokens and log-probabilities as bytes."""
    return np.asarray(completion.token_ids, np.int32).tobytes() + np.asarray(completion.logprobs, np.float32).tobytes()


def batches(config: EngineConfig) -> tuple[int, int]:
    """Batches with programs: one request alone, and as many as there are places, or programs would take long to compile."""
    return 1, config.max_requests


def plans_of(setting: Setting, config: EngineConfig) -> list[Plan]:
    """The plans of these batches."""
    return [plan for batch in batches(config) for plan in surely_made(setting, config, batch)]


def surely_made(setting: Setting, config: EngineConfig, requests: int) -> list[Plan]:
    """The plans that an engine with this configuration tries for `requests`, as far as that is known before it does.

    Where products do not depend on rows, the first canonical plan should be certified, and drafts may not be worth trying.
    """
    own = setting.schedule_fn(setting.size.model)
    plans = needed_plans(config, own, requests, NEEDS)
    return [*plans[:2]] if own.numerics.linear == "pinned" else [*plans]


def config_of(setting: Setting) -> EngineConfig:
    """Room for the largest wave and its neighbours."""
    size = setting.size
    return EngineConfig(
        max_requests=size.requests,
        max_len=size.completed_prompt + size.new_tokens,
        method="none",
        schedule=setting.schedule_fn(size.model),
    )
