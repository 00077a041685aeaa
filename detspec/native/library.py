"""Compiles the C of this folder for the processor at hand, and tells XLA of its functions.

A unit of functions takes a second or two for a dtype. It is compiled by a thread of its own: when one of its functions is
needed, or before, see `begin`. What came of it is kept where compiled programs are kept, under a digest of the source, the
options, the versions and the machine. So nodes of two kinds that share a home folder each get their own.
"""

import ctypes
import hashlib
import json
import os
import platform
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from detspec.compile_cache import kernel_cache
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.native.processor import NO_KERNELS, TILE_OPTIONS, cpu_facts, find_compiler, has_tiles

# Functions that are compiled together. A model needs one unit of products, and the rows.
UNITS = {
    "products": ("linear", "experts"),
    "int8_products": ("int8_linear", "int8_experts"),
    "rows": ("attention", "append", "append_int8", "copy", "take", "sum", "gate", "draw", "ceiling"),
    "integer": tuple(f"integer_{name}" for name in ("product", "norm", "gate", "attention", "noise", "append")),
}
UNIT_OF = {f"detspec_{name}": unit for unit, names in UNITS.items() for name in names}
# one text, the first file what all others need
SOURCES = tuple(
    f"{name}.c" for name in ("base", "products", "int8_products", "attention", "rows", "sample", "integer", "ceiling")
)
DTYPES = {jnp.dtype(jnp.float32): "F32", jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float16): "F16"}
# A cache in int8, and all of an integer model, take the functions for float32.
DTYPES |= {jnp.dtype(jnp.int8): "F32", jnp.dtype(jnp.int32): "F32"}
OPTIONS = ("-O2", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-psabi")

_lock = threading.Lock()
_begun: dict[tuple[str, str], Future[str]] = {}  # by unit and dtype: what the names of its functions end in
_threads = ThreadPoolExecutor(len(UNITS), thread_name_prefix="kernels")


def begin(function: str, dtype: DTypeLike) -> None:
    """Begins to compile the unit of a function, for a program that will need it; `target` raises what goes wrong."""
    _begin(UNIT_OF[function], _kind(dtype))


def target(function: str, dtype: DTypeLike) -> str:
    """The name by which XLA knows a function of C for weights or a cache of `dtype`; waits until it is compiled and loaded.

    The name has a digest of the source in it, so that compiled programs never meet other kernels than they were made with.

    Raises `InputError` if there are no kernels for `dtype`, no compiler is found, or it fails.
    """
    return f"{function}_{_begin(UNIT_OF[function], _kind(dtype)).result()}"


def kernel(function: str, dtype: DTypeLike, result: Any, *, in_place: Mapping[int, int] | None = None) -> Callable[..., Any]:
    """The call of a function of C inside of a program, as `target` finds it.

    `jax.vmap` of it runs the kernel on one element after the other, so each has the bits that it has by itself. It has no
    derivative.

    Args:
        function: its name, such as "detspec_linear".
        dtype: of weights or cache.
        result: shape and dtype of what it returns, or a list of them.
        in_place: by the number of an argument that it changes where it lies, the number of the result that this is.
    """
    aliases = None if in_place is None else dict(in_place)
    return jax.ffi.ffi_call(target(function, dtype), result, vmap_method="sequential", input_output_aliases=aliases)


def _kind(dtype: DTypeLike) -> str:
    if jnp.dtype(dtype) not in DTYPES:
        raise InputError(f'"cpu" kernels take {", ".join(map(str, DTYPES))}, got {jnp.dtype(dtype)}')
    return DTYPES[jnp.dtype(dtype)]


def _begin(unit: str, kind: str) -> Future[str]:
    """Has another thread register a unit, once; after a failure again."""
    with _lock:
        begun = _begun.get((unit, kind))
        if begun is None or (begun.done() and begun.exception() is not None):
            begun = _begun[unit, kind] = _threads.submit(_register, unit, kind)
        return begun


def _register(unit: str, kind: str) -> str:
    """Registers the functions of a unit; returns what their names end in."""
    library = _load(_machine_code(source_text(unit), options_for(kind)))
    ending = f"{kind}_{hashlib.sha256(source_text().encode()).hexdigest()[:8]}"
    for name in UNITS[unit]:
        capsule = jax.ffi.pycapsule(getattr(library, f"detspec_{name}"))
        jax.ffi.register_ffi_target(f"detspec_{name}_{ending}", capsule, platform="cpu")
    return ending


def source_text(unit: str | None = None) -> str:
    """The C of all kernels; of a `unit`, other functions are declared static, so the compiler leaves out what nothing calls."""
    base, *others = (files("detspec.native").joinpath(name).read_text(encoding="utf-8") for name in SOURCES)
    left_out = [function for function, its_unit in UNIT_OF.items() if unit not in (None, its_unit)]
    declared = [f"static XLA_FFI_Error *{function}(XLA_FFI_CallFrame *) __attribute__((unused));\n" for function in left_out]
    return "".join([base, *declared, *others])


def options_for(dtype: str) -> tuple[str, ...]:
    """The compiler's options on this machine; part of what decides bits, and given by what the fingerprint names.

    Intel's processors multiply pairs of bfloat16 at half of the speed of float32, so those without matrix tiles widen weights:
    measured 88 and 177 GFLOP/s on a core of an Emerald Rapids Xeon. AMD's should do it at twice that speed, which was not
    measured here.
    """
    facts = cpu_facts()
    dots = facts.get("vendor_id") == "AuthenticAMD" and "avx512_bf16" in facts.get("flags", "").split()
    march = "-march=native" if platform.machine() == "x86_64" else "-mcpu=native"
    tiles = ["-DAMX", *TILE_OPTIONS] if has_tiles() else []
    return (*OPTIONS, march, f"-DDTYPE={dtype}", *(["-DDOTS"] if dots else []), *tiles)


def multiply_adds_of_instruction(dtype: DTypeLike) -> int:
    """Multiply-adds of one instruction of products: of a vector of float32, of pairs of bfloat16, or of two tiles of them."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return 16
    return 16 * 16 * 32 if has_tiles() else 32 if "-DDOTS" in options_for("BF16") else 16


def _machine_code(source: str, options: tuple[str, ...]) -> bytes:
    """The compiled library, from a file if it was compiled before."""
    cache = kernel_cache()
    name = hashlib.sha256(json.dumps([fingerprint(), source, options]).encode()).hexdigest()
    code = cache.read(name) if cache else None
    if code is None:
        code = _compile(source, options)
        if cache:
            cache.write(name, code)
    return code


def _compile(source: str, options: tuple[str, ...]) -> bytes:
    compiler = find_compiler()
    if compiler is None:
        raise InputError(NO_KERNELS)
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
        in_memory = os.memfd_create("detspec_kernels")  # stays open: a second library of the same path would be the first
        with open(in_memory, "wb", closefd=False) as file:
            file.write(code)
        return ctypes.CDLL(f"/proc/self/fd/{in_memory}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        path.write_bytes(code)
        return ctypes.CDLL(str(path))
