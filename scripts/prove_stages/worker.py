"""Runs one stage in its own process: `python -m prove_stages.worker "decode" --results out/results.jsonl --size full --run 1`.

Each measurement is written down before the next begins. One that fails is written down, too, and the next one runs, unless the
device no longer answers: then this process ends, and the parent starts another.
"""

import argparse
import hashlib
import importlib
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from detspec.choices import IMPLEMENTATIONS, LINEARS
from detspec.errors import InputError
from prove_stages import history
from prove_stages.children import LOOK_S, RESTART, ROOT
from prove_stages.environment import Unusable
from prove_stages.journal import Entry, Journal
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.sizes import SIZES
from prove_stages.stages import CUT_OFF, DONE, SOME_FAILED, STAGES, UNUSABLE, Stage, stage_of

ERROR_CHARACTERS = 2000
CODE = ("detspec/**/*.py", "scripts/prove_stages/*.py", "tests/aot/kernel_shapes.py")
CODE_DIGITS = 8
SAME = ("device", "size", "implementation", "linear", "jax")  # of all results in a folder


def main() -> int:
    """Runs the stage; its exit status tells the parent whether to start another process for the rest."""
    args = parse()
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    stage = stage_of(args.stage)
    journal = Journal(args.results)
    lines = journal.lines()
    switches = {name: getattr(args, name) for name in ("implementation", "linear") if getattr(args, name)}
    try:
        earlier = {each.name: history.entries(lines, each.name) for each in STAGES}
        setting = Setting.here(SIZES[args.size], earlier, switches, ends=args.ends)
        facts = facts_of(setting, switches)
        check_same(history.machine(lines), facts)
    except (InputError, Unusable) as error:
        seconds = time.monotonic() - args.began
        journal.add("end", stage=stage.name, status=UNUSABLE, seconds=seconds, error=str(error), run=args.run)
        return 0
    journal.add("run", run=args.run, **facts)
    if stage.own_cache:
        folder = tempfile.TemporaryDirectory()
        jax.config.update("jax_compilation_cache_dir", folder.name)
    return run_stage(stage, setting, journal, began=args.began, run=args.run)


def parse() -> argparse.Namespace:
    """Parses the command line that the parent wrote."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS)
    parser.add_argument("--linear", choices=LINEARS)
    parser.add_argument("--began", type=float, required=True, help="when the process was started, of `time.monotonic`")
    parser.add_argument("--ends", type=float, required=True, help="when it is ended, of `time.monotonic`")
    parser.add_argument("--run", required=True, help="name of this run: what has failed in it is not tried again")
    return parser.parse_args()


def run_stage(stage: Stage, setting: Setting, journal: Journal, *, began: float, run: str) -> int:
    """Measures what is not done, and notes how the stage ended, unless another process is to go on."""

    def end(status: str, why: str) -> None:
        journal.add("end", stage=stage.name, status=status, seconds=time.monotonic() - began, error=why, run=run)

    lines = (history.of_run if stage.gate else history.of_code)(journal.lines(), run)
    done = history.known(lines, stage.name, run)
    failed = [name for name, line in history.measurements(lines, stage.name).items() if line["error"] and name in done]
    modules = [importlib.import_module(f"prove_stages.{name}") for name in stage.modules]
    todo = [each for module in modules for each in module.measurements(setting) if each.name not in done]
    if stage.compiles_first and todo:
        found = compile_all(program for module in modules for program in module.programs(setting))
        journal.add("measurement", stage=stage.name, **found, run=run)
    skipped = []
    took_s = 0.0  # by the last costly one
    for measurement in todo:
        if measurement.costly and setting.left_s < took_s:
            note = f"{setting.left_s:.0f} s are left, and the one before took {took_s:.0f}"
            journal.add("skipped", stage=stage.name, name=measurement.name, note=note, run=run)
            skipped.append(measurement.name)
            continue
        started = time.monotonic()
        try:
            is_measured = measured(journal, stage.name, measurement, run)
        except Unusable as unusable:
            end(UNUSABLE, str(unusable))
            return 0
        took_s = time.monotonic() - started if measurement.costly else took_s
        if not is_measured:
            failed.append(measurement.name)
        if (not is_measured and not device_answers()) or (measurement.apart and measurement is not todo[-1]):
            return RESTART
    why = [*failed, *([f"no time for {', '.join(skipped)}"] if skipped else [])]
    end(SOME_FAILED if failed else CUT_OFF if skipped else DONE, "; ".join(why))
    return 0


def facts_of(setting: Setting, switches: Mapping[str, str]) -> dict[str, str]:
    """Names what results depend on: the device, the size, the code, and how attention and canonical products are computed."""
    device = jax.devices()[0]
    numerics = setting.schedule_fn(setting.size.model).numerics
    return {
        "device": device.device_kind,
        "size": setting.size.name,
        "platform": device.platform,
        "implementation": numerics.implementation,
        "linear": numerics.linear,
        "switches": ", ".join(f"{name} {value}" for name, value in switches.items()),
        "code": code(),
        "jax": jax.__version__,
        "compiler": device.client.platform_version.splitlines()[-1],
    }


def code() -> str:
    """The first digits of SHA-256 over the package and the stages."""
    content = hashlib.sha256()
    for path in sorted(path for pattern in CODE for path in ROOT.glob(pattern)):
        content.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return content.hexdigest()[:CODE_DIGITS]


def check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `Unusable` if the results were begun on another device, in another size, with other numerics or another jax."""
    for name in SAME:
        if before and before.get(name) != now[name]:
            there = f"the results are of {name} {before.get(name)!r}, this is {now[name]!r}"
            raise Unusable(f"{there}: name another folder by --out, without --earlier")


def compile_all(programs: Iterable[Program]) -> dict[str, Any]:
    """Compiles programs into jax's cache at the same time; one that fails will fail again when it is called."""
    began = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = [pool.submit(lambda program=program: program.lower(None).compile()) for program in programs]
    failed = sum(future.exception() is not None for future in compiled)
    seconds = time.monotonic() - began
    entry = Entry("compiling", seconds, "s", bound="host", note=f"{len(compiled)} programs at the same time, {failed} failed")
    return {"name": "compiling", "seconds": seconds, "entries": [entry.to_json()], "error": ""}


def end_with_parent(parent: int) -> None:
    """Ends this process once its parent is gone: nothing else would free the device."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def measured(journal: Journal, stage: str, measurement: Measurement, run: str) -> bool:
    """Runs one measurement and writes down each of its figures at once; returns whether it succeeded.

    Raises `Unusable` if that is what it finds of the device.
    """
    began = time.monotonic()
    entries: dict[str, Any] = {}
    error = ""

    def add(kind: str, **more: Any) -> None:
        found = {"entries": list(entries.values()), "seconds": time.monotonic() - began, **more}
        journal.add(kind, stage=stage, name=measurement.name, **found, run=run)

    try:
        for entry in measurement.run():
            entries[entry.name] = entry.to_json()
            add("partial")
    except Unusable as unusable:
        add("measurement", error=str(unusable))
        raise
    except Exception:
        error = traceback.format_exc()[-ERROR_CHARACTERS:]
    if error:
        entries.clear()
    add("measurement", error=error)
    return not error


def device_answers() -> bool:
    """Whether the device still computes: after some errors a process cannot use it any more."""
    try:
        return int(jnp.add(1, 1)) == 2
    except Exception:
        return False


if __name__ == "__main__":
    sys.exit(main())
