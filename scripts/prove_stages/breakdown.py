"""The device's own time in each kernel of a step, and of a layer's products, from profiles: what no clock of the host shows."""

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax

from detspec.schedule import Schedule
from prove_stages.journal import Entry
from prove_stages.passes import Runner, label, pass_program, running, work_of
from prove_stages.products import LAYERS, contest
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import Call

CALLS = 5
NAMED = 6  # kernels that a note names

Kernels = Mapping[str, tuple[int, float]]  # by name: how often it ran, and seconds in all


def programs(setting: Setting) -> Iterator[Program]:
    """Steps and passes, then products."""
    for schedule in schedules(setting):
        yield pass_program(setting, setting.size.model, schedule)
    for rows in product_rows(setting):
        yield from contest(setting, rows).values()


def measurements(setting: Setting) -> Iterator[Measurement]:
    """One for each."""
    cfg = setting.size.model

    @cache
    def runner() -> Runner:
        return running(setting, cfg)

    for schedule in schedules(setting):
        yield Measurement(label(cfg, schedule), lambda schedule=schedule: of_pass(setting, schedule, runner()(schedule)))
    for rows in product_rows(setting):
        yield Measurement(f"products of {rows} rows", partial(of_products, setting, rows))


def of_pass(setting: Setting, schedule: Schedule, call: Call) -> Iterator[Entry]:
    """Time of all kernels of a pass."""
    found = profiled(call)
    work = work_of(setting, setting.size.model, schedule)
    yield Entry(
        f"kernels of a {label(setting.size.model, schedule)}",
        1e6 * seconds_of(found) / CALLS,
        "us",
        bound=setting.bound(work),
        predicted=setting.predicted(work, 1e6),
        note=described(found),
    )


def of_products(setting: Setting, rows: int) -> Iterator[Entry]:
    """Time of all kernels that a layer's products take."""
    for kind, program in contest(setting, rows).items():
        found = profiled(program.call())
        yield Entry(
            f"products of a layer, {kind}, {rows} rows",
            1e6 * seconds_of(found) / CALLS / LAYERS,
            "us",
            bound=setting.bound(program.work),
            predicted=setting.predicted(program.work, 1e6 / LAYERS),
            note=described(found),
        )


def schedules(setting: Setting) -> list[Schedule]:
    """Ordinary and canonical steps, and a canonical pass over many tokens."""
    own = setting.schedule_fn(setting.size.cfg)
    rows, step_rows = setting.size.compared
    steps = [schedule for size in (1, step_rows) for schedule in (own.fast(size), own.with_budget(size, 1))]
    return [*steps, own.with_budget(rows, own.budget.window)]


def product_rows(setting: Setting) -> tuple[int, ...]:
    """One row, those of a step, and those of a pass."""
    rows, step_rows = setting.size.compared
    return 1, step_rows, rows


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
    """What ran on the streams of a device, in a trace of `events`, whose times are microseconds."""
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


def described(kernels: Kernels) -> str:
    """The kernels that take longest, with how often one call runs them and microseconds of each."""
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:NAMED]
    return ", ".join(f"{number / CALLS:.0f} x {1e6 * seconds / number:.1f} us {name}" for name, (number, seconds) in longest)
