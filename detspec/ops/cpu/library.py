"""Compiles `kernels.c` for the processor at hand, and tells XLA of its functions.

Compiling takes seconds. What came of it is kept where compiled programs are kept, under a digest of the source, the compiler's
options and the machine. So cluster nodes of two kinds that share a home folder each get their own.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
import threading
from importlib.resources import files
from pathlib import Path

import jax

from detspec.compile_cache import kernel_cache
from detspec.errors import InputError
from detspec.ops.cpu.compiler import NO_COMPILER, find_compiler

OPTIONS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
TARGETS = ("detspec_linear", "detspec_attention")  # functions of `kernels.c`

_lock = threading.Lock()
_registered: dict[str, str] = {}  # names that XLA knows the functions by


def target_name(function: str) -> str:
    """The name by which XLA knows a function of `kernels.c`, which is compiled and loaded first if it was not yet.

    The name has a digest of the source in it, so that compiled programs never meet other kernels than they were made with.

    Raises `InputError` if there is no compiler, or it fails.
    """
    with _lock:
        if not _registered:
            source = _source()
            library = _load(_machine_code(source))
            digest = hashlib.sha256(source.encode()).hexdigest()[:8]
            for target in TARGETS:
                name = f"{target}_{digest}"
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
                _registered[target] = name
        return _registered[function]


def _source() -> str:
    return files("detspec.ops.cpu").joinpath("kernels.c").read_text(encoding="utf-8")


def _machine_code(source: str) -> bytes:
    """The compiled library, from a file if it was compiled before."""
    options = (*OPTIONS, "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native")
    cache = kernel_cache()
    name = cache.name(source, *options) if cache else ""
    code = cache.read(name) if cache else None
    if code is None:
        code = _compile(source, options)
        if cache:
            cache.write(name, code)
    return code


def _compile(source: str, options: tuple[str, ...]) -> bytes:
    compiler = find_compiler()
    if compiler is None:
        raise InputError(NO_COMPILER)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        command = [compiler, *options, f"-I{jax.ffi.include_dir()}", "-xc", "-", "-o", str(library), "-lm"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"the CPU kernels do not compile: {' '.join(command)} says\n{done.stderr.strip()[-2000:]}")
        return library.read_bytes()


def _load(code: bytes) -> ctypes.CDLL:
    """Loads a library; from memory where that is possible, because folders for temporary files may forbid to run them."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("detspec_kernels"), "wb") as file:
            file.write(code)
            file.flush()
            return ctypes.CDLL(f"/proc/self/fd/{file.fileno()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        path.write_bytes(code)
        return ctypes.CDLL(str(path))
