"""The machine that CPU kernels are compiled for: its C compiler, its processor, and whether they may use matrix tiles."""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
NO_COMPILER = "no C compiler was found: install gcc or clang, or name one in the environment variable CC"
NO_KERNELS = f"the CPU kernels are compiled on first use, and {NO_COMPILER}"
# Intel's AMX, and the instructions that bring numbers into tiles.
TILE_FLAGS = {"amx_tile", "amx_bf16", "amx_int8", "avx512bw", "avx512_vnni"}
TILE_OPTIONS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
ARCH_PRCTL = 158  # a call of Linux on x86-64
REQUEST_PERMISSION = 0x1023
TILE_DATA = 18  # the tile registers


def find_compiler() -> str | None:
    """The compiler that the environment variable CC names, or else the first of `COMPILERS` that is installed."""
    chosen = os.environ.get("CC")
    return next(filter(None, map(shutil.which, (chosen,) if chosen else COMPILERS)), None)


def cpu_facts() -> dict[str, str]:
    """Facts that Linux gives of the first processor, by name: "vendor_id", "flags" and others; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}


@functools.cache
def has_tiles() -> bool:
    """Whether the processor has matrix tiles, the compiler knows them, and Linux grants them to the threads of this process.

    Committed bits depend on it, so fingerprints name it.
    """
    flags = cpu_facts().get("flags", "").split()
    return platform.machine() == "x86_64" and TILE_FLAGS.issubset(flags) and _in_compiler() and _granted()


def _in_compiler() -> bool:
    compiler = find_compiler()
    if compiler is None:
        return False
    command = [compiler, *TILE_OPTIONS, "-E", "-xc", "-"]
    return subprocess.run(command, input=b"", capture_output=True, check=False).returncode == 0


def _granted() -> bool:
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0
