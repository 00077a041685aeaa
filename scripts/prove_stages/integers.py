"""Integer models on the device: the hashes that the package comes with, and steps next to those in bfloat16."""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detspec.bench.bench import random_model
from detspec.config import ModelConfig
from detspec.doctor.conformance import run_conformance
from detspec.integer.conformance import TEXTS
from detspec.integer.spec import IntMatrix, Scale
from detspec.model.params import Params, param_shapes
from detspec.model.to_integer import integer_config
from detspec.schedule import Schedule
from prove_stages.journal import Entry
from prove_stages.passes import Runner, label, pass_program, running, work_of
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import in_turns, ratio, typical

MOST_OF_FLOATS = 1.0  # time of decoding, over that of the same model in bfloat16


class Pair(NamedTuple):
    """A pass in bfloat16 and the same in integers."""

    name: str
    floats: Schedule
    integers: Schedule

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one row."""
        return self.floats.budget.window == 1


def programs(setting: Setting) -> Iterator[Program]:
    """The passes of both models; conformance has programs of its own."""
    floats, integers = models(setting)
    for pair in pairs(setting):
        yield pass_program(setting, floats, pair.floats)
        yield pass_program(setting, integers, pair.integers)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Conformance first, then each pass in turns with that in bfloat16."""
    yield Measurement("conformance", conformance)

    @cache
    def runners() -> tuple[Runner, Runner]:
        floats, integers = models(setting)
        made = random_model(floats).params, jax.jit(partial(random_integers, integers))()
        return running(setting, floats, made[0]), running(setting, integers, made[1])

    for pair in pairs(setting):
        yield Measurement(pair.name, partial(measure, setting, pair, runners))


def models(setting: Setting) -> tuple[ModelConfig, ModelConfig]:
    """The model in bfloat16, and in integers."""
    return setting.size.model, integer_config(setting.size.model)


def pairs(setting: Setting) -> list[Pair]:
    """The step and the pass that are compared elsewhere."""
    cfg, integers = models(setting)
    floats, own = setting.schedule_fn(cfg), setting.schedule_fn(integers)
    rows, step = setting.size.compared
    window = own.budget.window
    found = [(floats.fast(step), own.with_budget(step, 1)), (floats.with_budget(rows, window), own.with_budget(rows, window))]
    return [Pair(f"{label(cfg, first)}, in integers", first, second) for first, second in found]


def conformance() -> Iterator[Entry]:
    """How many hashes are those of the definition."""
    report = run_conformance()
    number = len(report.expected)
    note = f"differing: {', '.join(report.differing)}" if report.differing else f"texts {report.found[TEXTS][:16]}"
    yield Entry("hashes of the definition", float(number - len(report.differing)), f"of {number}", float(number), note=note)


def measure(setting: Setting, pair: Pair, runners: Callable[[], tuple[Runner, Runner]]) -> Iterator[Entry]:
    """The time of a pass in integers, and over that of the same in bfloat16."""
    floats, integers = runners()
    samples = in_turns({"floats": floats(pair.floats), "integers": integers(pair.integers)}, setting.size)
    work = work_of(setting, models(setting)[1], pair.integers)
    bound, predicted = setting.bound(work), setting.predicted(work, 1e3)
    yield Entry(pair.name, 1e3 * typical(samples, "integers"), "ms", bound=bound, predicted=predicted)
    bar = setting.bar(MOST_OF_FLOATS) if pair.decodes else None
    note = f"{1e3 * typical(samples, 'floats'):.3g} ms in bfloat16"
    yield Entry(f"{pair.name}, over bfloat16", ratio(samples, "integers", "floats"), "", bar, True, note=note)


def random_integers(cfg: ModelConfig) -> Params:
    """Random weights of an integer model, about as large as trained ones; under `jax.jit` they are made on the device."""
    key = jax.random.key(0)

    def made(path: Any, leaf: Any) -> Any:
        own = jax.random.fold_in(key, sum(map(ord, jax.tree_util.keystr(path))))
        if isinstance(leaf, Scale):
            power = round(math.log2(leaf.values.size) / 2)
            return Scale(jnp.full(leaf.values.shape, 2**13, jnp.int32), jnp.asarray(power - 13, jnp.int32))
        if isinstance(leaf, IntMatrix):
            values = jnp.maximum(jax.random.bits(own, leaf.values.shape, jnp.uint8).astype(jnp.int8), -127)
            rows = leaf.mantissa.shape
            return IntMatrix(values, jnp.full(rows, 2**14, jnp.int32), jnp.full(rows, -26, jnp.int32))
        return jax.random.randint(own, leaf.shape, -1000, 1000, jnp.int32)

    return jax.tree.map_with_path(made, param_shapes(cfg), is_leaf=lambda leaf: isinstance(leaf, IntMatrix | Scale))
