"""One stage in its own process: `python -m prove_stages.worker "decode" --results out/results.jsonl --size full --run 1`.

Each measurement is written down before the next begins. One that fails is written down, too, and the next one runs, unless the
device no longer answers: then this process ends, and the parent starts another.
"""

import argparse
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

from prove_stages import history
from prove_stages.children import LOOK_S, RESTART
from prove_stages.journal import Entry, Journal
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.sizes import SIZES
from prove_stages.stages import DONE, SOME_FAILED, stage_of

ERROR_CHARACTERS = 2000


def main() -> int:
    """Runs the stage; its exit status tells the parent whether to start another process for the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--began", type=float, required=True, help="when the process was started, of `time.monotonic`")
    parser.add_argument("--run", required=True, help="name of this run: what has failed in it is not tried again")
    args = parser.parse_args()
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    stage = stage_of(args.stage)
    journal = Journal(args.results)
    device = jax.devices()[0]
    facts = {"device": device.device_kind, "size": args.size, "platform": device.platform, "jax": jax.__version__}
    check_same(history.machine(journal.lines()), facts)
    journal.add("run", run=args.run, compiler=device.client.platform_version.splitlines()[-1], **facts)

    def end(status: str, error: str = "") -> None:
        journal.add("end", stage=stage.name, status=status, seconds=time.monotonic() - args.began, error=error, run=args.run)

    if stage.own_cache:
        folder = tempfile.TemporaryDirectory()
        jax.config.update("jax_compilation_cache_dir", folder.name)
    lines = journal.lines()
    setting = Setting.here(SIZES[args.size], {name: history.entries(lines, name) for name in ("ceilings", "doctor")})
    done = history.known(lines, stage.name, args.run)
    failed = [name for name, line in history.measurements(lines, stage.name).items() if line["error"] and name in done]
    modules = [importlib.import_module(f"prove_stages.{name}") for name in stage.modules]
    todo = [each for module in modules for each in module.measurements(setting) if each.name not in done]
    if stage.compiles_first and todo:
        found = compile_all(program for module in modules for program in module.programs(setting))
        journal.add("measurement", stage=stage.name, **found, run=args.run)
    for measurement in todo:
        if not measured(journal, stage.name, measurement, args.run):
            failed.append(measurement.name)
            if not device_answers():
                return RESTART
    end(SOME_FAILED if failed else DONE, ", ".join(failed))
    return 0


def check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Ends the process if the results were begun on another device, or in another size."""
    for name in ("device", "size"):
        if before and before[name] != now[name]:
            sys.exit(f"the results are of {name} {before[name]!r}, this is {now[name]!r}: name another folder by --out")


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
    """Runs one measurement and writes it down; whether it succeeded."""
    began = time.monotonic()
    entries = []
    error = ""
    try:
        entries = [entry.to_json() for entry in measurement.run()]
    except Exception:
        error = traceback.format_exc()[-ERROR_CHARACTERS:]
    seconds = time.monotonic() - began
    journal.add("measurement", stage=stage, name=measurement.name, seconds=seconds, entries=entries, error=error, run=run)
    return not error


def device_answers() -> bool:
    """Whether the device still computes: after some errors a process cannot use it any more."""
    try:
        return int(jnp.add(1, 1)) == 2
    except Exception:
        return False


if __name__ == "__main__":
    sys.exit(main())
