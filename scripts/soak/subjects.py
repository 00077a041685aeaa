"""The models that engines run, the requests for them, and the answers that are expected."""

import dataclasses
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

import detspec as ds
from detspec.checkpoint.digest import digest_model
from detspec.config import ModelConfig
from detspec.engine.engine import Engine
from detspec.environment import default_schedule
from detspec.mesh import make_mesh, param_specs, put
from detspec.model.dense import with_fields
from detspec.model.params import Params, init_params
from detspec.schedule import Schedule
from scripts.soak.answers import Answer, Answers, name_of
from scripts.soak.requests import Material, python_texts, random_texts, some_lines
from scripts.soak.serving import serve
from scripts.soak.sizes import Size
from tests.fakes import random_model
from tests.mesh.shapes import CFG

# In float32, because rounding to bfloat16 hides most differences; 1, 2 and 4 chips can share it.
RANDOM_CFG = dataclasses.replace(CFG, dtype="float32")
ALONE: dict[str, Any] = {"max_requests": 1, "method": "none", "prefix_sharing": False}
AMONG_OTHERS: dict[str, Any] = {"max_requests": 8, "method": "none", "prefix_sharing": False}
SHIPPED, RANDOM, TIED = "shipped", "random", "tied"


@dataclasses.dataclass
class Subject:
    """A model with requests for it.

    Attributes:
        name: name of the model.
        model: the model, on one chip.
        requests: the requests.
        max_len: positions that each of them may take.
        page: positions of a page.
        few_pages: pages that are too few for several of the requests at once.
        other: a model that may be its draft.
        folder: where answers are kept.
    """

    name: str
    model: ds.Model
    requests: list[ds.Request]
    max_len: int
    page: int
    few_pages: int
    other: ds.Model
    folder: Path
    _on_chips: dict[int, ds.Model] = dataclasses.field(default_factory=dict)

    def schedule(self, window: int) -> Schedule:
        """The device's default with this page and window."""
        schedule = default_schedule(self.model.cfg).with_numerics(page=self.page)
        return schedule.with_budget(schedule.budget.rows, window)

    def on(self, chips: int) -> ds.Model:
        """The model on several chips."""
        if chips == 1:
            return self.model
        if chips not in self._on_chips:
            cfg = self.model.cfg
            params = put(self.model.params, make_mesh(cfg, chips), param_specs(cfg))
            self._on_chips[chips] = dataclasses.replace(self.model, params=params)
        return self._on_chips[chips]

    @cached_property
    def samples(self) -> dict[str, ds.Request]:
        """The samples of all requests by name, as requests of their own."""
        return {name_of(sample.id, sample.index): sample for request in self.requests for sample in request.samples()}

    @cached_property
    def replaying(self) -> Engine:
        """Replays answers, eight at a time."""
        config = ds.EngineConfig(max_requests=8, max_len=self.max_len, schedule=self.schedule(window=16))
        return Engine(self.model, config)

    @cached_property
    def expected(self) -> Answers:
        """Deterministic answers, one request at a time."""
        return self._kept("expected", ALONE, self.requests)

    @cached_property
    def ordinary_alone(self) -> Answers:
        """Ordinary answers, one request at a time."""
        return self._kept("ordinary_alone", ALONE, list(map(ordinary, self.requests)))

    @cached_property
    def ordinary_among_others(self) -> Answers:
        """Ordinary answers, eight requests at a time."""
        return self._kept("ordinary_among_others", AMONG_OTHERS, list(map(ordinary, self.requests)))

    def _kept(self, what: str, config: dict[str, Any], requests: list[ds.Request]) -> Answers:
        """Answers from a file of the folder, which is written if it is missing."""
        path = self.folder / f"{self.name}.{what}.json"
        if not path.exists():
            schedule = self.schedule(window=16)
            engine = ds.Engine(self.model, ds.EngineConfig(**config, max_len=self.max_len, schedule=schedule))
            path.with_suffix(".part").write_text(json.dumps(serve(engine, requests).answers))
            path.with_suffix(".part").replace(path)
        return {name: Answer(*fields) for name, fields in json.loads(path.read_text()).items()}


def ordinary(request: ds.Request) -> ds.Request:
    """Returns the request unverified."""
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, deterministic=False))


def subjects(folder: Path, seed: int, size: Size) -> dict[str, Subject]:
    """A small random model, the same one with weights in which each logit occurs twice, and perhaps the shipped model."""
    folder.mkdir(exist_ok=True)
    weights = {RANDOM: random_model(RANDOM_CFG), TIED: tied(random_model(RANDOM_CFG))}
    small_cfg = with_fields(RANDOM_CFG, num_layers=1)
    small = model_of(small_cfg, init_params(small_cfg, jax.random.key(1)))
    material = Material(random_texts(RANDOM_CFG.vocab_size, 400), most_prompt=90, most_new=100)
    requests = requests_of(some_lines(material, size.engine_requests, seed))
    made = {
        name: Subject(name, model_of(RANDOM_CFG, params), requests, 208, 16, 14, small, folder)
        for name, params in weights.items()
    }
    if size.with_shipped:
        model = ds.load()
        material = Material(python_texts(model.tokenizer), 250, 80, ("\n\n", "return"))
        requests = requests_of(some_lines(material, size.engine_requests // 2, seed))
        made[SHIPPED] = Subject(SHIPPED, model, requests, 384, 64, 6, model, folder)
    return made


def requests_of(lines: list[dict[str, Any]]) -> list[ds.Request]:
    """Lines of a job as requests."""
    return [ds.Request(line["id"], tuple(line["prompt_token_ids"]), ds.SamplingParams(**line["sampling"])) for line in lines]


def model_of(cfg: ModelConfig, params: Params) -> ds.Model:
    """A model without a tokenizer."""
    return ds.Model(cfg, params, None, (), digest_model(cfg, params))


def tied(params: Params) -> Params:
    """Weights in which each token's logit is that of a neighbour, so that the likeliest token always has an equal."""
    head = params["head"]
    return {**params, "head": head.at[1::2].set(head[::2])}
