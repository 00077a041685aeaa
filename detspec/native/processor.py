"""The processor: what Linux says of it, and whether the CPU kernels may use its matrix tiles."""

import ctypes
import functools
import platform
import subprocess
from pathlib import Path

from detspec.native.compiler import find_compiler

# Intel's AMX, and the instructions that bring numbers into tiles.
TILE_FLAGS = {"amx_tile", "amx_bf16", "amx_int8", "avx512bw", "avx512_vnni"}
TILE_OPTIONS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
ARCH_PRCTL = 158  # a call of Linux on x86-64
REQUEST_PERMISSION = 0x1023
TILE_DATA = 18  # the tile registers


def cpu_facts() -> dict[str, str]:
    """What Linux says of the first processor, by name: "vendor_id", "flags" and others; nothing on other systems."""
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
