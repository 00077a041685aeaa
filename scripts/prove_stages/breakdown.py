"""Device time of each kernel of a step, and of a layer's products, from profiles; and what passes between kernels."""

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax

from detspec.bench.bench import random_model
from detspec.roofline import Work
from detspec.schedule import Schedule
from prove_stages.journal import Entry
from prove_stages.passes import Runner, label, pass_program, running, work_of
from prove_stages.products import contest
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import Call, in_turns, typical

CALLS = 5
NAMED = 6  # kernels that a note names

Kernels = Mapping[str, tuple[int, float]]  # by name: how often it ran, and seconds in all


def programs(setting: Setting) -> Iterator[Program]:
    """Steps and passes, then products."""
    for schedule in (*several(setting), *single(setting)):
        yield pass_program(setting, setting.size.model, schedule)
    for rows in (*setting.size.compared, 1):
        yield from products(setting, rows).values()


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Passes and products of several rows first: other stages compare them."""
    cfg = setting.size.model

    @cache
    def runner() -> Runner:
        return running(setting, cfg, random_model(cfg).params)

    def pass_of(schedule: Schedule) -> Measurement:
        return Measurement(label(cfg, schedule), lambda: of_pass(setting, schedule, runner()(schedule)))

    def products_of(rows: int) -> Measurement:
        return Measurement(f"products of {rows} rows", partial(of_products, setting, rows))

    rows, step_rows = setting.size.compared
    yield from map(pass_of, several(setting))
    yield from map(products_of, (step_rows, rows))
    yield from map(pass_of, single(setting))
    yield products_of(1)


def of_pass(setting: Setting, schedule: Schedule, call: Call) -> Iterator[Entry]:
    """Time of all kernels of a pass, and of the pass by the clock."""
    cfg = setting.size.model
    yield from both_times(setting, f"a {label(cfg, schedule)}", work_of(setting, cfg, schedule), call)


def of_products(setting: Setting, rows: int) -> Iterator[Entry]:
    """Time of all kernels that the products of LAYERS layers take, and of their program by the clock."""
    for program in products(setting, rows).values():
        yield from both_times(setting, program.name, program.work, program.call())


def both_times(setting: Setting, name: str, work: Work, call: Call) -> Iterator[Entry]:
    """Microseconds of all kernels of one call, from a profile, and by the clock without one: the rest is between kernels."""
    found = profiled(call)
    kernels_us = 1e6 * seconds_of(found) / CALLS
    about = {"bound": setting.bound(work), "predicted": setting.predicted(work, 1e6)}
    yield Entry(f"kernels of {name}", kernels_us, "us", note=described(found), **about)
    clock_us = 1e6 * typical(in_turns({name: call}, setting.size), name)
    note = f"{clock_us - kernels_us:.0f} us of it between {number_of(found) / CALLS:.0f} kernels"
    yield Entry(f"{name}, by the clock", clock_us, "us", note=note, **about)


def several(setting: Setting) -> list[Schedule]:
    """A canonical and an ordinary step of several rows, and a canonical pass over many tokens."""
    own = setting.schedule_fn(setting.size.cfg)
    rows, step_rows = setting.size.compared
    return [own.with_budget(step_rows, 1), own.fast(step_rows), own.with_budget(rows, own.budget.window)]


def single(setting: Setting) -> list[Schedule]:
    """A canonical and an ordinary step of one row."""
    own = setting.schedule_fn(setting.size.cfg)
    return [own.with_budget(1, 1), own.fast(1)]


def products(setting: Setting, rows: int) -> dict[str, Program]:
    """Products of a layer in bfloat16."""
    return {kind: program for kind, program in contest(setting, rows).items() if kind != "int8"}


def profiled(call: Call) -> Kernels:
    """The kernels that CALLS calls run, after two that warm up."""
    for _ in range(2):
        jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for _ in range(CALLS):
                result = call()
            jax.block_until_ready(result)
        (file,) = Path(folder).rglob("perfetto_trace.json.gz")
        return kernels_of(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"])


def kernels_of(events: Sequence[Mapping[str, Any]]) -> Kernels:
    """Sums up what ran on the streams of a device, in a trace of `events`, whose times are microseconds."""
    processes = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    number: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("ph") != "X" or not processes.get(event["pid"], "").startswith("/device:"):
            continue
        if threads.get((event["pid"], event["tid"]), "").startswith("Stream"):
            number[event["name"]] += 1
            seconds[event["name"]] += 1e-6 * event["dur"]
    if not number:
        raise RuntimeError("the profile names no kernel: this device or its driver does not say what runs")
    return {name: (number[name], seconds[name]) for name in number}


def seconds_of(kernels: Kernels) -> float:
    """Seconds of all of them."""
    return sum(seconds for _, seconds in kernels.values())


def number_of(kernels: Kernels) -> int:
    """Counts how many of them ran."""
    return sum(number for number, _ in kernels.values())


def described(kernels: Kernels) -> str:
    """The kernels that take longest, with how often one call runs them and microseconds of each."""
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:NAMED]
    return ", ".join(f"{number / CALLS:.0f} x {1e6 * seconds / number:.1f} us {name}" for name, (number, seconds) in longest)
