"""Several engines with the same weights, each on devices of its own, driven as one.

One thread steps them in turn. A step waits for what ran on its engine's devices and starts what follows, so the devices of all
engines work at the same time. A request goes to the engine with the fewest samples in flight; no bit depends on which that is.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import SingleDeviceSharding

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig, is_count
from detspec.draft.source import Drafter
from detspec.engine.agreement import Agreement
from detspec.engine.certify import Certificate
from detspec.engine.drive import drive
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.planner import Planner
from detspec.engine.policy import Needs, Plan
from detspec.engine.request import Completion, Request, Update, generate_all, score_all
from detspec.errors import InputError
from detspec.mesh import Place, first_devices, make_mesh, mesh_of, param_specs, put
from detspec.model.params import Params
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule


class EngineGroup:
    """Engines on the devices of one process; `add`, `abort`, `step`, `run`, `generate` and others are those of an `Engine`.

        group = ds.EngineGroup(ds.load("my-model"), ds.EngineConfig(max_requests=32), num_engines=8)
        completions = group.generate(prompts, ds.SamplingParams(max_tokens=64))

    Requests share pages of the cache with those in the same engine only.

    Attributes:
        engines: the engines. The first one stands for all where they are alike: `config`, `schedule`, `certificates`.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        num_engines: int,
        drafters: Mapping[str, Drafter] | None = None,
    ) -> None:
        """Copies the weights to further devices, as many for each engine as `model` lies on, and allocates the caches.

        Raises `InputError` as `Engine` does, if there are too few devices, if several processes share them, or if the engines'
        fingerprints differ.
        """
        if not is_count(num_engines):
            raise InputError(f"the number of engines must be a positive integer, got {num_engines!r}")
        if jax.process_count() > 1:
            raise InputError(
                "engines side by side need a process of their own: run one process, or one engine over all processes"
            )
        self.engines = tuple(
            Engine(_moved(model, place), config, drafters=_drafters_at(place, drafters))
            for place in _places(model, num_engines)
        )
        first, *others = (engine.fingerprint() for engine in self.engines)
        for number, other in enumerate(others, 1):
            if differing := [name for name in first if first[name] != other[name]]:
                name = differing[0]
                values = f"{name} {other[name]!r}, engine 0 has {first[name]!r}"
                raise InputError(f"engine {number} has {values}: their bits differ, so use one engine")
        self._num_open = [0] * num_engines  # samples in flight, by engine
        self._where: dict[str, list[int]] = {}  # engine of each request, and how many of its samples are in flight

    @property
    def model(self) -> Model:
        """The weights, as the first engine has them."""
        return self.engines[0].model

    @property
    def config(self) -> EngineConfig:
        """How each engine runs."""
        return self.engines[0].config

    @property
    def schedule(self) -> Schedule:
        """Anchor of all canonical passes."""
        return self.engines[0].schedule

    @property
    def agreement(self) -> Agreement:
        """What the first engine asks before it uses what only its own process knows; a group's process is alone."""
        return self.engines[0].agreement

    @property
    def planner(self) -> Planner:
        """Plans of the first engine, with their times."""
        return self.engines[0].planner

    @property
    def certificates(self) -> dict[Plan, Certificate]:
        """What is known of each program of the first engine."""
        return self.engines[0].certificates

    @property
    def acceptance_by_match_length(self) -> dict[int, float]:
        """Chance in the first engine that a guess of prompt lookup agreed after a match of so many tokens."""
        return self.engines[0].acceptance_by_match_length

    @property
    def num_places(self) -> int:
        """Most samples that run at once."""
        return sum(engine.num_places for engine in self.engines)

    @property
    def num_pages(self) -> int:
        """Cache pages of all engines."""
        return sum(engine.num_pages for engine in self.engines)

    @property
    def num_live(self) -> int:
        """Samples that have a place."""
        return sum(engine.num_live for engine in self.engines)

    @property
    def num_tokens(self) -> int:
        """Tokens that all segments so far have committed."""
        return sum(engine.num_tokens for engine in self.engines)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do, or updates to return."""
        return any(engine.has_work for engine in self.engines)

    def fingerprint(self) -> dict[str, object]:
        """Everything but the request that committed bits may depend on; the same of all engines."""
        return self.engines[0].fingerprint()

    def request(self, prompt: str | Sequence[int], sampling: SamplingParams, *, id: str = "0") -> Request:
        """See `Engine.request`."""
        return self.engines[0].request(prompt, sampling, id=id)

    def prepare(self, num_requests: int | None = None, needs: Needs | None = None, *, first_only: bool = False) -> None:
        """See `Engine.prepare`; `num_requests` are shared among the engines, which compile at the same time."""
        share = None if num_requests is None else -(-num_requests // len(self.engines))
        with ThreadPoolExecutor(len(self.engines), thread_name_prefix="prepare") as threads:
            list(threads.map(lambda engine: engine.prepare(share, needs, first_only=first_only), self.engines))

    def add(self, request: Request, *, stream: bool = False, outbox: None = None) -> None:
        """See `Engine.add`; ids of requests in flight must differ."""
        if request.id in self._where:
            raise InputError(f"a request with the id {request.id!r} is in flight already")
        number = min(range(len(self.engines)), key=self._num_open.__getitem__)
        self.engines[number].add(request, stream=stream)
        self._where[request.id] = [number, request.sampling.n]
        self._num_open[number] += request.sampling.n

    def abort(self, id: str) -> None:
        """See `Engine.abort`."""
        if id in self._where:
            self.engines[self._where[id][0]].abort(id)

    def step(self, outbox: None = None) -> list[Update]:
        """Starts a segment of each engine that has work, and returns what those before brought; see `Engine.step`."""
        return self._noted(update for engine in self.engines if engine.has_work for update in engine.step())

    def update_params(self, params: Params, weight_version: str | None = None) -> None:
        """See `Engine.update_params`; each engine gets a copy on its own devices."""
        specs = param_specs(self.model.cfg)
        for engine in self.engines:
            engine.update_params(put(params, engine.device.place, specs), weight_version)

    def stop(self) -> list[Update]:
        """See `Engine.stop`."""
        updates = self._noted(update for engine in self.engines for update in engine.stop())
        self._where.clear()
        self._num_open = [0] * len(self.engines)
        return updates

    def run(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """See `Engine.run`; ids must differ."""
        try:
            for updates in drive(self, requests):
                yield from (update.completion for update in updates if update.completion is not None)
        finally:
            if self._where:
                self.stop()

    def generate(
        self, prompts: str | Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """See `Engine.generate`."""
        return generate_all(self, prompts, sampling)

    def score(
        self,
        texts: str | Sequence[str | Sequence[int]],
        starts: int | Sequence[int] = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """See `Engine.score`."""
        return score_all(self, texts, starts, sampling)

    def _noted(self, updates: Iterable[Update]) -> list[Update]:
        """`updates`, after what has ended is no longer counted."""
        found = list(updates)
        for id in (update.request.id for update in found if update.completion is not None):
            entry = self._where[id]
            self._num_open[entry[0]] -= 1
            entry[1] -= 1
            if not entry[1]:
                del self._where[id]
        return found


AnyEngine = Engine | EngineGroup


def _places(model: Model, num_engines: int) -> list[Place]:
    """Where each engine's weights go: first where they are, then on further devices of this process, as many each time."""
    mesh = mesh_of(model.params)
    own = [next(iter(jax.tree.leaves(model.params)[0].devices()))] if mesh is None else list(mesh.devices.flat)
    others = [device for device in jax.local_devices() if device not in own]
    devices = first_devices(num_engines * len(own), [*own, *others])
    cut = [devices[first : first + len(own)] for first in range(0, len(devices), len(own))]
    return [_place(model.cfg, each) for each in cut]


def _place(cfg: ModelConfig, devices: list[jax.Device]) -> Place:
    return make_mesh(cfg, len(devices), devices) if len(devices) > 1 else SingleDeviceSharding(devices[0])


def _moved(model: Model, place: Place) -> Model:
    specs = param_specs(model.cfg)
    return dataclasses.replace(model, params=put(model.params, place, specs))


def _drafters_at(place: Place, drafters: Mapping[str, Drafter] | None) -> dict[str, Drafter]:
    return {name: drafter._replace(params=put(drafter.params, place)) for name, drafter in (drafters or {}).items()}
