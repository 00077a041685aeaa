#!/usr/bin/env python
"""Runs the demonstration as other processors would: with other instructions in XLA's programs and in the kernels of C.

    python scripts/measure_demo.py                     # prints the table; about half a minute for each processor
    python scripts/measure_demo.py --only AVX2 "level 0"

XLA is told by a flag which instructions it may use. Kernels are compiled by a script in place of the compiler: it adds options,
and knows no matrix tiles where the processor has none. Each processor begins with an empty cache.
The exit code is 1 if the demonstration fails on one of them: if no ordinary text changes, or a deterministic bit does.
"""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGES = re.compile(r"^  all \d+ at once +(\d+)/(\d+) +\S+ +(\d+)/\d+ +(\d+)/", re.MULTILINE)
COMPILER = """#!/bin/sh
case "$*" in *-mamx*) {refuse} ;; esac
exec cc "$@" {options}
"""
NO_COMPILER = "none"


@dataclasses.dataclass(frozen=True)
class Processor:
    """A kind of processor, as this one plays it.

    Attributes:
        name: as tables call it.
        flags: of XLA.
        options: the last options of the C compiler; None leaves it alone, `NO_COMPILER` takes it away.
        tiles: whether kernels may use matrix tiles.
        one_core: whether it has one core, by `taskset`.
    """

    name: str
    flags: str = ""
    options: str | None = None
    tiles: bool = False
    one_core: bool = False


PROCESSORS = (
    Processor("this one"),
    Processor("this one, one core", one_core=True),
    Processor("level 0", "--xla_backend_optimization_level=0"),
    Processor("AMX, XLA with AVX-512 alone", "--xla_cpu_max_isa=AVX512", "", tiles=True),
    Processor("AVX-512 with bfloat16", "--xla_cpu_max_isa=AVX512", "-DDOTS"),
    Processor("AVX-512", "--xla_cpu_max_isa=AVX512", ""),
    Processor("AVX2", "--xla_cpu_max_isa=AVX2", "-march=haswell"),
    Processor("AVX2, level 0", "--xla_cpu_max_isa=AVX2 --xla_backend_optimization_level=0", "-march=haswell"),
    # Without fused multiply-adds kernels call a function for each, and the demonstration takes more than a quarter of an hour.
    Processor("XLA with AVX alone", "--xla_cpu_max_isa=AVX"),
    Processor("XLA with SSE4.2 alone", "--xla_cpu_max_isa=SSE4_2"),
    Processor("no C compiler", "", NO_COMPILER),
    Processor("no C compiler, AVX2", "--xla_cpu_max_isa=AVX2", NO_COMPILER),
)


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each processor; 1 if the demonstration failed on one."""
    names = [processor.name for processor in PROCESSORS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"only these of {', '.join(names)}")
    args = parser.parse_args(argv)
    print("| processor | ordinary texts that change | deterministic | deterministic log-probs | exit code | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    failed = False
    for processor in PROCESSORS:
        if processor.name in (args.only or names):
            failed |= demonstrate(processor) != 0
    return int(failed)


def demonstrate(processor: Processor) -> int:
    """Runs the demonstration, prints its line, and returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        env = environment(processor, Path(folder))
        command = [*(("taskset", "-c", "0") if processor.one_core else ()), sys.executable, "-m", "detspec", "demo"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    found = CHANGES.search(done.stdout)
    if found is None:
        print(done.stderr[-2000:], file=sys.stderr)
    ordinary, number, texts, logprobs = found.groups() if found else "----"
    seconds = time.monotonic() - began
    print(
        f"| {processor.name} | {ordinary} of {number} | {texts} | {logprobs} | {done.returncode} | {seconds:.0f} |", flush=True
    )
    return done.returncode


def environment(processor: Processor, folder: Path) -> dict[str, str]:
    """The variables of a process that takes this machine for `processor`; `folder` keeps its compiler and programs."""
    variables = os.environ | {
        "DETSPEC_COMPILE_CACHE": str(folder / "cache"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": processor.flags,
    }
    if processor.options is not None:
        compiler = folder / "compiler"
        variables["CC"] = str(compiler)
        if processor.options != NO_COMPILER:
            compiler.write_text(COMPILER.format(refuse=":" if processor.tiles else "exit 1", options=processor.options))
            compiler.chmod(0o700)
    return variables


if __name__ == "__main__":
    sys.exit(main())
