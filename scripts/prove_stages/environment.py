"""The machine, before anything is measured: what it is, whether its programs compile, and whether a kernel runs."""

import glob
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from prove_stages.journal import Entry
from prove_stages.kernels import LARGEST_ERROR, error_of
from prove_stages.paged import attention_program, attention_shape, exact, schedule_of
from prove_stages.programs import Measurement, Program, Setting

PACKAGES = ("jax", "jaxlib", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "nvidia-cuda-nvcc", "nvidia-nvvm")
LIBDEVICE = "nvvm/libdevice/libdevice.10.bc"  # functions such as exp, in a CUDA toolkit
TOOLKITS = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda")  # where XLA looks, besides the one that jax names
ASKED = "name,memory.total,driver_version,clocks.sm,clocks.mem,temperature.gpu"  # of nvidia-smi
GB = 1e9
REMEDY = (
    "install nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-runtime of the driver's CUDA version by pip, or name the folder of "
    "a CUDA toolkit in the variable CUDA_ROOT"
)
REFERENCE = "--implementation reference goes on without kernels, into another --out"


class Unusable(Exception):
    """Raised where nothing can be measured; its text is one sentence that says why, and what to do."""


def programs(setting: Setting) -> Iterator[Program]:
    """Yields what compilers are tried with."""
    yield mathematics()
    yield smallest_kernel(setting)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Facts first, so that they are written whatever comes."""
    yield Measurement("machine", describe)
    yield Measurement("compilers", partial(find_compilers, setting.platform))
    yield Measurement("program", partial(try_program, setting.platform))
    yield Measurement("kernel", partial(try_kernel, setting))


def describe() -> Iterator[Entry]:
    """The device and the packages."""
    device = jax.devices()[0]
    yield Entry("cores of the host", float(os.cpu_count() or 0), "", note=f"Python {platform.python_version()}")
    yield Entry("packages", 1.0, "yes or no", note=", ".join(_versions()))
    capability = getattr(device, "compute_capability", None)
    found = f"compute capability {capability}" if capability else device.platform
    yield Entry("devices", float(len(jax.devices())), "", note=f"{device.device_kind}, {found}")
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    yield Entry("memory that programs may use", limit / GB, "GB", note="" if limit else "the device does not say")
    if device.platform == "gpu":
        yield Entry("driver", 1.0, "yes or no", note=_driver())


def find_compilers(on: str) -> Iterator[Entry]:
    """Finds ptxas and libdevice; what XLA finds is tried next."""
    if on != "gpu":
        yield Entry("ptxas and libdevice", 1.0, "yes or no", note=f"not needed on a {on}")
        return
    yield Entry("folder of CUDA, as jax sees it", float(_cuda_path() is not None), "yes or no", note=str(_jaxs_cuda_path()))
    ptxas, libdevice = find_ptxas(), find_libdevice()
    yield Entry("ptxas", float(ptxas is not None), "yes or no", note="" if ptxas is None else f"{ptxas}: {_release(ptxas)}")
    yield Entry("libdevice", float(libdevice is not None), "yes or no", note=libdevice or "")


def try_program(on: str) -> Iterator[Entry]:
    """A program of functions that need libdevice; raises `Unusable` if it does not compile or is wrong."""
    program = mathematics()
    x = np.linspace(0.1, 3.0, 1024, dtype=np.float32)
    try:
        found = np.asarray(jax.jit(program.fn)(jnp.asarray(x)))
    except Exception as error:
        raise Unusable(advice(str(error), on, find_ptxas(), find_libdevice())) from error
    wrong = float(np.abs(found / (np.exp(x) + np.log1p(x) * np.sin(x)) - 1).max())
    if not wrong < 1e-3:
        raise Unusable(f"exp, log1p and sin are wrong by {wrong:.1g} on this device: its compiler or driver is broken.")
    yield Entry("XLA compiles and runs exp, log1p, sin", 1.0, "yes or no", 1.0, note=f"largest relative error {wrong:.1g}")


def try_kernel(setting: Setting) -> Iterator[Entry]:
    """The smallest attention against float64; a failure is a figure, since the rest can go on without kernels."""
    shape = attention_shape("small", 1, 1, 130, decode=True)
    schedule = schedule_of(shape, setting)
    name = f"a kernel of {schedule.numerics.implementation} is right"
    try:
        program = attention_program(shape, schedule)
        args = jax.jit(program.make)()
        found = np.asarray(program.jitted(*args))
        wrong = error_of(found, exact(shape, schedule, args), np.ones(found.shape, bool))
        holds, note = wrong <= LARGEST_ERROR, f"relative error {wrong:.2g}"
    except Exception as error:
        holds, note = False, _first_line(error)
    yield Entry(name, float(holds), "yes or no", 1.0, note=note if holds else f"{note}; {REFERENCE}")


def advice(error: str, on: str, ptxas: str | None, libdevice: str | None) -> str:
    """Says in one sentence why XLA compiles nothing, with what to do."""
    if on == "gpu" and (ptxas is None or "ptxas" in error or "PTX compilation provider" in error):
        where = "finds no ptxas" if ptxas is None else f"does not find or cannot run ptxas, which is at {ptxas}"
        return f"XLA {where}, without which no program for a GPU compiles: {REMEDY}."
    if on == "gpu" and (libdevice is None or "libdevice" in error):
        where = "finds no libdevice" if libdevice is None else f"does not find libdevice, which is at {libdevice}"
        return f"XLA {where}, without which exp and its like do not compile: {REMEDY}."
    return f"XLA does not compile or run a program of exp, log1p and sin: {_first_line(error)}."


def mathematics() -> Program:
    """Functions that a GPU has no instructions for."""
    return Program("exp, log1p, sin", lambda x: jnp.exp(x) + jnp.log1p(x) * jnp.sin(x), lambda: (jnp.zeros(1024, jnp.float32),))


def smallest_kernel(setting: Setting) -> Program:
    """Decode attention of one sequence."""
    shape = attention_shape("small", 1, 1, 130, decode=True)
    return attention_program(shape, schedule_of(shape, setting), calls=1)


def find_ptxas() -> str | None:
    """The first ptxas where XLA looks: in the toolkits' folders, then on the PATH."""
    folders = [f"{root}/bin" for root in _toolkits()]
    return shutil.which("ptxas", path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def find_libdevice() -> str | None:
    """The first libdevice in the toolkits' folders."""
    return next((f"{root}/{LIBDEVICE}" for root in _toolkits() if Path(root, LIBDEVICE).is_file()), None)


def _toolkits() -> list[str]:
    """Folders of CUDA toolkits."""
    given = [_cuda_path(), os.environ.get("CUDA_ROOT"), os.environ.get("CUDA_HOME")]
    return [*filter(None, given), *(folder for pattern in TOOLKITS for folder in sorted(glob.glob(pattern)))]


def _cuda_path() -> str | None:
    """The toolkit that jax found among its packages; jax 0.11 may call none "None"."""
    path = _jaxs_cuda_path()
    return None if path in (None, "None") else str(path)


def _jaxs_cuda_path() -> object:
    """Asks jax what it tells XLA; private, so a later version may have another name for it."""
    import jax._src.lib

    return getattr(jax._src.lib, "cuda_path", None)


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _driver() -> str:
    return _output(["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"])


def _release(ptxas: str) -> str:
    return _output([ptxas, "--version"]).splitlines()[-1]


def _output(command: list[str]) -> str:
    """Returns what a command prints, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _first_line(error)
    return done.stdout.strip() or f"{command[0]} ended with {done.returncode}"


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
