"""Common parts of the panels: a model, its engines, requests, their arrivals, and what each request gave, bit for bit."""

import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from detspec.bench.bench import bench_prompts, random_model
from detspec.bench.rounds import Variants
from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs
from detspec.engine.request import Completion, Request
from detspec.environment import default_schedule
from detspec.errors import InputError
from detspec.model.dense import with_fields
from detspec.presets import preset
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule

Lengths = tuple[int, int]  # tokens of a prompt, new tokens
Shape = tuple[str, int]  # name of a preset, number of layers
BOTH = Needs(deterministic=True, ordinary=True, processing=False)


def config_of(shape: Shape) -> ModelConfig:
    """The preset with as many layers."""
    name, layers = shape
    return with_fields(preset(name), num_layers=layers)


def model_of(shape: Shape) -> Model:
    """Random weights of `config_of(shape)`."""
    return random_model(config_of(shape))


def compiled_invariant(cfg: ModelConfig) -> Schedule:
    """This device's schedule with products that compilers make batch-invariant by tiles of one size, without kernels in C.

    Ordinary generation of such an engine has the compiler's own products, as libraries do.
    """
    own = default_schedule(cfg)
    if own.numerics.implementation == "cpu":
        own = own.with_numerics(implementation="reference")
    return own.with_numerics(linear="pinned")


def engine_of(model: Model, **config: Any) -> Engine:
    """An engine without drafts and without shared prompts, unless `config` says otherwise."""
    return Engine(model, EngineConfig(**{"method": "none", "prefix_sharing": False, **config}))


def refusal(engine: Engine, requests: Sequence[Request]) -> str:
    """Why this device certifies no plan of `engine` for `requests`, which it runs once; "" if it does."""
    try:
        play(engine, requests)
    except InputError as error:
        engine.stop()
        return str(error)
    return ""


def requests_of(model: Model, lengths: Sequence[Lengths]) -> list[Request]:
    """Greedy ordinary requests that end at their length; the ids are "0", "1" and so on."""
    prompts = bench_prompts(model, len(lengths), max(prompt_len for prompt_len, _ in lengths))
    return [
        Request(str(i), prompt[:prompt_len], SamplingParams(max_tokens=new, ignore_eos=True, deterministic=False))
        for i, (prompt, (prompt_len, new)) in enumerate(zip(prompts, lengths, strict=True))
    ]


def mixed(requests: Sequence[Request], share: int, seed: int = 42) -> list[Request]:
    """Returns the requests, `share` % of them deterministic, rounded up; larger shares include the choice of smaller ones."""
    number = -(-share * len(requests) // 100)
    chosen = set(np.random.default_rng(seed).permutation(len(requests))[:number].tolist())
    return [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, deterministic=i in chosen))
        for i, request in enumerate(requests)
    ]


class Played(NamedTuple):
    """A run of requests through an engine; times in seconds, by the ids of the requests."""

    seconds: float
    completions: dict[str, Completion]
    first_s: dict[str, float]  # from the arrival to the first token
    whole_s: dict[str, float]  # from the arrival to the end

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and texts, as LLM-42 counts throughput."""
        return sum(len(one.prompt_token_ids) + len(one.token_ids) for one in self.completions.values())


def play(engine: Engine, requests: Sequence[Request], due: Sequence[float] | None = None, *, by_steps: bool = False) -> Played:
    """Runs `requests` to their ends.

    Args:
        engine: has nothing else to do.
        requests: in the order of arrival.
        due: when each arrives; all at once if None. With `due`, tokens are streamed.
        by_steps: `due` counts steps of the engine, so that the same requests meet in every run; else seconds.
    """
    is_streamed = due is not None
    waiting = deque(zip(due or [0.0] * len(requests), requests, strict=True))
    arrived_s: dict[str, float] = {}
    played = Played(0.0, {}, {}, {})
    num_steps = 0
    began = time.perf_counter()
    while waiting or engine.has_work:
        now_s = time.perf_counter() - began
        while waiting and waiting[0][0] <= (num_steps if by_steps else now_s):
            due_at, request = waiting.popleft()
            arrived_s[request.id] = now_s if by_steps else due_at
            engine.add(request, stream=is_streamed)
        num_steps += 1
        if not engine.has_work:
            time.sleep(0.0 if by_steps else max(0.0, waiting[0][0] - now_s))
            continue
        updates = engine.step()
        now_s = time.perf_counter() - began
        for update in updates:
            id = update.request.id
            if update.token_ids:
                played.first_s.setdefault(id, now_s - arrived_s[id])
            if update.completion is not None:
                played.whole_s[id] = now_s - arrived_s[id]
                played.completions[id] = update.completion
    return played._replace(seconds=time.perf_counter() - began)


def arrivals(number: int, mean: float, *, seed: int = 0) -> list[float]:
    """Times of a Poisson process, `mean` apart on average; the same draws for every `mean`."""
    return (mean * np.cumsum(np.random.default_rng(seed).exponential(size=number))).tolist()


class Seen:
    """The different results of each request over all runs of a panel."""

    def __init__(self) -> None:
        self._variants = Variants()
        self._digests: dict[str, set[str]] = defaultdict(set)
        self._num_results = 0

    def add(self, completion: Completion, *, deterministic: bool, where: str = "") -> None:
        """Adds a result; `where` names what committed bits may depend on, so that only equal ones are compared."""
        named = dataclasses.replace(completion, id=f"{where} {completion.id}")
        self._variants.add("deterministic" if deterministic else "ordinary", named)
        if deterministic:
            self._digests[named.id].add(completion.digest)
            self._num_results += 1

    def add_all(self, requests: Sequence[Request], played: Played, where: str = "") -> None:
        """The results of one run of `requests`."""
        for request in requests:
            self.add(played.completions[request.id], deterministic=request.sampling.deterministic, where=where)

    def counts(self) -> dict[str, int]:
        """How many deterministic results there were, the most different ones of a request (promised: 1), and the control."""
        return {
            "deterministic_results": self._num_results,
            "digest_variants": max(map(len, self._digests.values()), default=0),
            **self._variants.counts(),
        }
