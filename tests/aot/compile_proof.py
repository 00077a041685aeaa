"""Compiles every program of `scripts/prove_on_device.py` for devices that are not here; writes docs/data/prove_plan.json.

    .venv/aot/bin/python tests/aot/compile_proof.py                    # all stages for all targets, about half an hour
    .venv/aot/bin/python tests/aot/compile_proof.py --stages passes --targets h100

The seconds say how long compiling takes on this machine, one program after the other; compile nothing else meanwhile. Programs
whose text is in the file already, from the same compilers, are not compiled again, not for another target of their platform
either: remove the file to measure anew.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax must not look for the devices compiled for

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from jax.sharding import SingleDeviceSharding  # noqa: E402
from prove_stages.plan import FILE, different  # noqa: E402
from prove_stages.programs import Program, Setting  # noqa: E402
from prove_stages.sizes import FULL, Size  # noqa: E402
from prove_stages.stages import STAGES, Stage, stage_of  # noqa: E402

from detspec.target_compilers import compilers, device_of  # noqa: E402
from detspec.targets import Target, target  # noqa: E402

TARGETS = ("h100", "h200", "v6e:2x2")
DIGITS = 16  # of the SHA-256 of a program's text


def main() -> None:
    """Compiles, and rewrites the file after each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), metavar="NAME", help="what to compile for")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stages", nargs="+", default=names, choices=names, metavar="NAME", help="what to compile")
    args = parser.parse_args()
    content = known()
    for name in args.targets:
        platform = target(name).platform
        found = content["targets"].setdefault(name, {"platform": platform, "stages": {}})
        seen = content["programs"].setdefault(platform, {})
        for stage in map(stage_of, args.stages):
            if platform in stage.platforms:
                rows = []
                for program in programs_of(stage, FULL, target(name)):
                    rows.append(compiled(program, target(name), seen))
                    write(content)
                found["stages"][stage.name] = rows
                seconds = sum(seen[row["text"]]["compile_s"] for row in different(rows))
                print(f"{name}: {stage.name}: {seconds:.0f} s for {len(different(rows))} programs", flush=True)
        found["stages"] = {stage: rows for stage, rows in found["stages"].items() if stage in names}
    forget_unused(content)
    write(content)


def forget_unused(content: dict[str, Any]) -> None:
    """Leaves out programs that no stage of any target of their platform has any more."""
    for platform, programs in content["programs"].items():
        targets = [found for found in content["targets"].values() if found["platform"] == platform]
        used = {row["text"] for found in targets for rows in found["stages"].values() for row in rows}
        content["programs"][platform] = {text: program for text, program in programs.items() if text in used}
    content["programs"] = {platform: programs for platform, programs in content["programs"].items() if programs}


def known() -> dict[str, Any]:
    """Reads what the file holds, if the same compilers wrote it."""
    anew = {"versions": compilers(), "cores": os.cpu_count(), "targets": {}, "programs": {}}
    content = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else anew
    return content if content["versions"] == anew["versions"] else anew


def programs_of(stage: Stage, size: Size, device: Target) -> Iterator[Program]:
    """Yields the programs of a stage on a device that is not here."""
    for name in stage.modules:
        yield from importlib.import_module(f"prove_stages.{name}").programs(Setting.of_target(size, device))


def compiled(program: Program, device: Target, seen: dict[str, Any]) -> dict[str, Any]:
    """Compiles a program of a stage; adds its seconds and memory to `seen`, by its text, if it is not there."""
    began = time.perf_counter()
    lowered = program.lower(SingleDeviceSharding(device_of(device)))
    trace_s = time.perf_counter() - began
    text = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:DIGITS]
    if text not in seen:
        began = time.perf_counter()
        memory = lowered.compile().memory_analysis()
        compile_s = time.perf_counter() - began
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        seen[text] = {"trace_s": trace_s, "compile_s": compile_s, "peak_bytes": peak - memory.alias_size_in_bytes}
        print(f"{trace_s:7.1f} {compile_s:7.1f} s  {program.name}", file=sys.stderr, flush=True)
    return {"name": program.name, "text": text, "least_s": program.work.seconds(device), "calls": program.calls}


def write(content: dict[str, Any]) -> None:
    """Rewrites the file."""
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
