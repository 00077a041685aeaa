"""Steps, canonical steps and canonical passes of a model by rows: what a token costs, and what verifying costs."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.bench.bench import random_model
from detspec.cache import KVCache, init_cache
from detspec.config import ModelConfig
from detspec.held import Jitted
from detspec.model.params import Params, param_shapes, pass_work
from detspec.model.transformer import forward
from detspec.roofline import Work
from detspec.schedule import Schedule
from detspec.state import Windows
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import Call, in_turns, ratio, typical

MOST_OF_FLOOR = 1.3
MOST_OF_STEP = 1.3  # a pass that verifies many tokens
MOST_OF_SAME = 1.1  # a canonical step of as many rows

Runner = Callable[[Schedule], Call]  # makes calls of a pass


def programs(setting: Setting) -> Iterator[Program]:
    """Steps and passes at the depth of most stages."""
    for schedule in measured_schedules(setting, setting.size.steps, setting.size.passes):
        yield pass_program(setting, setting.size.model, schedule)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """The step and the pass that are compared come first, each ratio as soon as both of its parts are measured."""
    yield from of_depth(setting, setting.size.model, setting.size.steps, setting.size.passes)


def of_depth(setting: Setting, cfg: ModelConfig, steps: tuple[int, ...], passes: tuple[int, ...]) -> Iterator[Measurement]:
    """The measurements of a model of some depth; weights and cache are made once."""

    @cache
    def runner() -> Runner:
        return running(setting, cfg, random_model(cfg).params)

    own = setting.schedule_fn(setting.size.cfg)
    compared, step_rows = setting.size.compared
    for rows in first(steps, step_rows):
        step = own.fast(rows)
        canonical = own.with_budget(rows, 1)
        yield timed(setting, cfg, step, runner)
        yield timed(setting, cfg, canonical, runner)
        yield contest(setting, cfg, (canonical, step, MOST_OF_SAME), runner)
        if rows == step_rows:
            verifying = own.with_budget(compared, own.budget.window)
            yield timed(setting, cfg, verifying, runner)
            yield contest(setting, cfg, (verifying, step, MOST_OF_STEP), runner)
    for rows in passes:
        if rows != compared:
            yield timed(setting, cfg, own.with_budget(rows, own.budget.window), runner)


def first(rows: tuple[int, ...], chosen: int) -> tuple[int, ...]:
    """Moves the `chosen` number to the front."""
    return chosen, *(number for number in rows if number != chosen)


def timed(setting: Setting, cfg: ModelConfig, schedule: Schedule, runner: Callable[[], Runner]) -> Measurement:
    """The time of one pass."""
    return Measurement(label(cfg, schedule), lambda: measure(setting, cfg, schedule, runner()))


def contest(
    setting: Setting, cfg: ModelConfig, compared: tuple[Schedule, Schedule, float], runner: Callable[[], Runner]
) -> Measurement:
    """A canonical pass over a step; `compared` are both, and the most that the pass may cost."""
    canonical, step, most = compared
    name = f"{label(cfg, canonical)} over {label(cfg, step)}"
    works = [work_of(setting, cfg, schedule) for schedule in (canonical, step)]
    entry = Entry(name, 0.0, "", setting.bar(most), True, predicted=setting.predicted_ratio(*works))
    return Measurement(name, lambda: compare(setting, entry, runner()(canonical), runner()(step)))


def measure(setting: Setting, cfg: ModelConfig, schedule: Schedule, runner: Runner) -> Iterator[Entry]:
    """The time of one pass, and over the least that this device's own ceilings allow."""
    name = label(cfg, schedule)
    seconds = typical(in_turns({name: runner(schedule)}, setting.size), name)
    work = work_of(setting, cfg, schedule)
    bound = setting.bound(work)
    yield Entry(name, 1e3 * seconds, "ms", bound=bound, predicted=setting.predicted(work, 1e3))
    if least := setting.predicted_s(work):
        bar = setting.bar(MOST_OF_FLOOR)
        yield Entry(f"{name}, over the least", seconds / least, "", bar, True, bound=bound, predicted=1.0)


def compare(setting: Setting, entry: Entry, canonical: Call, step: Call) -> Iterator[Entry]:
    """A canonical pass over a step, in turns: the value of `entry`."""
    samples = in_turns({"pass": canonical, "step": step}, setting.size)
    yield dataclasses.replace(entry, value=ratio(samples, "pass", "step"))


def work_of(setting: Setting, cfg: ModelConfig, schedule: Schedule) -> Work:
    """The work of a pass of `schedule`, none of it padding."""
    return pass_work(cfg, schedule, windows=schedule.budget.groups, context=setting.size.context // 4)


def running(setting: Setting, cfg: ModelConfig, params: Params) -> Runner:
    """Makes calls of passes that hand one cache on."""
    held = [new_cache(setting, cfg)]

    def runner(schedule: Schedule) -> Call:
        windows = windows_of(setting, schedule)

        def call() -> Any:
            largest, held[0] = one_pass(params, windows, held[0], cfg=cfg, schedule=schedule)
            return largest

        return call

    return runner


def pass_program(setting: Setting, cfg: ModelConfig, schedule: Schedule) -> Program:
    """Makes a pass a program: the one that `running` calls."""
    work = work_of(setting, cfg, schedule)
    static = {"cfg": cfg, "schedule": schedule}
    return Program(
        label(cfg, schedule), one_pass, partial(shapes_of, setting, cfg, schedule), static=static, work=work, calls=10
    )


def shapes_of(setting: Setting, cfg: ModelConfig, schedule: Schedule) -> tuple[Params, Windows, KVCache]:
    """Weights, windows and cache of a pass, as shapes."""
    return param_shapes(cfg), *jax.eval_shape(lambda: (windows_of(setting, schedule), new_cache(setting, cfg)))


@partial(Jitted, static_argnames=("cfg", "schedule"), donate_argnames=("cache",))
def one_pass(
    params: Params, windows: Windows, cache: KVCache, *, cfg: ModelConfig, schedule: Schedule
) -> tuple[jax.Array, KVCache]:
    """Runs a pass: the largest logit of each row, and the cache."""
    logits, cache, _ = forward(params, cfg, windows, cache, numerics=schedule.numerics)
    return logits.max(-1), cache


def new_cache(setting: Setting, cfg: ModelConfig) -> KVCache:
    """Room for as many sequences as any pass has."""
    size = setting.size
    own = setting.schedule_fn(cfg)
    most = max(*size.steps, max(size.passes) // own.budget.window)
    return init_cache(cfg, max_requests=most, max_len=size.context // 4, numerics=own.numerics)


def windows_of(setting: Setting, schedule: Schedule) -> Windows:
    """The last window of as many sequences as the pass has groups."""
    G, W = schedule.budget.groups, schedule.budget.window
    start = np.full(G, setting.size.context // 4 - W, np.int32)
    tokens = np.random.default_rng(0).integers(0, setting.size.cfg.vocab_size, (G, W)).astype(np.int32)
    arrays = (tokens, np.arange(G, dtype=np.int32), start, np.full(G, W, np.int32))
    return Windows(*map(jnp.asarray, arrays))


def schedules(setting: Setting, steps: tuple[int, ...], passes: tuple[int, ...]) -> list[Schedule]:
    """Steps on the fast path, then canonical passes in windows of the device's own length."""
    own = setting.schedule_fn(setting.size.cfg)
    return [*map(own.fast, steps), *(own.with_budget(rows, own.budget.window) for rows in passes)]


def measured_schedules(setting: Setting, steps: tuple[int, ...], passes: tuple[int, ...]) -> list[Schedule]:
    """Lists schedules, and canonical steps of as many rows, which an engine takes where it certifies them."""
    own = setting.schedule_fn(setting.size.cfg)
    return [*schedules(setting, steps, passes), *(own.with_budget(rows, 1) for rows in steps)]


def label(cfg: ModelConfig, schedule: Schedule) -> str:
    """Names it: "step of 32 rows, 8 layers", "canonical step of 32 rows, 8 layers", "pass of 256 rows, 8 layers"."""
    step = "step" if schedule.numerics.reductions == "native" else "canonical step"
    kind = step if schedule.budget.window == 1 else "pass"
    return f"{kind} of {schedule.budget.rows} rows, {cfg.num_layers} layer{'s' * (cfg.num_layers > 1)}"
