"""What the machine is: its default schedule, the fingerprint of every result, and where its compiled programs are kept."""

import dataclasses
import hashlib
import json
import os
import platform
import warnings
from importlib.metadata import version
from pathlib import Path

import jax

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.schedule import Budget, FastPath, Numerics, Schedule

# Canonical passes by platform. On the CPU the cache is float32: an in-place write into a bf16 array converts the whole array.
DEFAULT_SCHEDULES = {
    "cpu": Schedule(Numerics(page=64, query_tile=16, cache_dtype="float32"), Budget(64, 16)),
    "gpu": Schedule(Numerics(page=128, query_tile=16, cache_dtype="bfloat16"), Budget(256, 16)),
    "tpu": Schedule(Numerics(page=128, query_tile=16, cache_dtype="bfloat16"), Budget(256, 16)),
}
HOPPER = "9.0"  # the compute capability whose instructions the GPU kernels are written in; Blackwell's are others
WIDE_HEAD_DIM, WIDE_HEAD_PAGE = 256, 64  # a Hopper GPU's shared memory does not hold longer pages of heads so wide
TILE_ROWS = 128  # query rows that a Hopper GPU's registers hold: positions of a tile times query heads of a KV head

# The `FastPath` of decoding (`block_pages`, `splits`), by a part of the device's kind, frozen: two pages a step keep a TPU's
# registers busy, two splits both TensorCores of a v4 or a v5p (whose kind is "TPU v5") when one row is decoded. On a GPU a row
# takes `K * splits` thread blocks, and each of 132 processors holds one: 8 heads x 16. None of these has been measured.
FAST_BLOCKS = {
    "TPU v4": (2, 2),
    "TPU v5 lite": (2, 1),
    "TPU v5": (2, 2),
    "TPU v6": (2, 1),
    "TPU7x": (2, 1),
    "NVIDIA H": (1, 16),
}


def schedule_for(platform: str, device_kind: str, capability: str = "", cfg: ModelConfig | None = None) -> Schedule:
    """The default schedule of a device, for a model if one is given: kernels where there are any for it.

    Args:
        platform: "cpu", "gpu" or "tpu".
        device_kind: as jax names it.
        capability: a GPU's compute capability, as "9.0". GPUs other than Hopper's run the reference attention, with a warning.
        cfg: the model; on a GPU, wide heads ask for shorter pages, and many query heads of a KV head for shorter tiles.
    """
    schedule = DEFAULT_SCHEDULES[platform]
    if platform == "gpu" and capability != HOPPER:
        warnings.warn(
            f"the GPU kernels are for compute capability {HOPPER} (Hopper); {device_kind} has {capability or 'none'} and runs "
            "the reference attention, which is slower",
            stacklevel=2,
        )
    elif platform != "cpu":
        block_pages, splits = next((blocks for kind, blocks in FAST_BLOCKS.items() if kind in device_kind), (1, 1))
        schedule = schedule.with_numerics(implementation=f"pallas_{platform}")
        schedule = dataclasses.replace(schedule, fast_path=FastPath(block_pages, splits))
        if platform == "gpu" and cfg is not None:
            fits = max(TILE_ROWS * cfg.num_kv_heads // cfg.num_heads, 1)
            schedule = schedule.with_numerics(
                page=WIDE_HEAD_PAGE if cfg.head_dim >= WIDE_HEAD_DIM else schedule.numerics.page,
                query_tile=min(schedule.numerics.query_tile, 1 << (fits.bit_length() - 1)),
            )
    return schedule


def default_schedule(cfg: ModelConfig | None = None) -> Schedule:
    """The schedule of this process's default device, for a model if one is given."""
    device = jax.devices()[0]
    return schedule_for(device.platform, device.device_kind, getattr(device, "compute_capability", ""), cfg)


def chosen_schedule(schedule: Schedule | None, cfg: ModelConfig) -> Schedule:
    """`schedule`, or the default one for `cfg` if it is None.

    Raises:
        InputError: this process's device does not run the implementation that `schedule` names.
    """
    if schedule is None:
        return default_schedule(cfg)
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "")
    runs = {
        "reference": True,
        "pallas_tpu": device.platform == "tpu",
        "pallas_gpu": device.platform == "gpu" and capability == HOPPER,
    }
    if not schedule.numerics.interpret and not runs[schedule.numerics.implementation]:
        needed = {"pallas_tpu": "a TPU", "pallas_gpu": f"a GPU of compute capability {HOPPER} (Hopper)"}[
            schedule.numerics.implementation
        ]
        raise InputError(
            f"Numerics.implementation {schedule.numerics.implementation!r} needs {needed}, this process computes on "
            f'{device.device_kind}: use "reference", or interpret=True to try it out slowly'
        )
    return schedule


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
