"""What the machine is: its default schedule, the fingerprint of every result, and where its compiled programs are kept."""

import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import jax

from detspec.config import Schedule

# Canonical passes by backend. On the CPU the cache is float32: an in-place write into a bf16 array converts the whole array.
DEFAULT_SCHEDULES = {
    "cpu": Schedule(rows=64, window=16, page=64, query_tile=16, cache_dtype="float32"),
    "gpu": Schedule(rows=256, window=16, page=128, query_tile=16, cache_dtype="bfloat16"),
    "tpu": Schedule(rows=256, window=16, page=128, query_tile=16, cache_dtype="bfloat16"),
}


def default_schedule() -> Schedule:
    """The schedule of this process's default backend."""
    return DEFAULT_SCHEDULES[jax.default_backend()]


def fingerprint() -> dict[str, str]:
    """What the committed bits may depend on besides model, request and schedule: device kind and compiler versions.

    On a CPU the instruction sets count too: XLA compiles for them, and a virtual machine may hide some of its model's.
    """
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    return {
        "detspec": version("detspec"),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "backend": device.platform,
        "device_kind": _cpu_model() if on_cpu else device.device_kind,
        "instruction_sets": hashlib.sha256(_cpu_flags().encode()).hexdigest()[:16] if on_cpu else "",
        "compiler": device.client.platform_version.replace("\n", " "),
        "mesh": "1",
    }


def enable_compile_cache() -> Path:
    """Keeps compiled programs in the user's cache folder for the next start; call it before anything is compiled.

    One folder for each fingerprint: a home folder may be shared by unlike machines. The environment
    variable JAX_COMPILATION_CACHE_DIR, if set, is taken as it is. Returns the folder.
    """
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if chosen:
        return Path(chosen)
    machine = json.dumps(fingerprint(), sort_keys=True)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "detspec" / "xla" / hashlib.sha256(machine.encode()).hexdigest()[:16]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # the many small programs add up
    return folder


def _cpu_flags() -> str:
    """The instruction sets that the processor offers: a virtual machine may hide some of its model's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")


def _cpu_model() -> str:
    """The processor's own name: XLA compiles for its instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines[:40])}
    model = named.get("model name", platform.machine())
    return f"{model} family {named.get('cpu family', '?')} model {named.get('model', '?')}"
