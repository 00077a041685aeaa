"""The machine: its default schedule, the fingerprint that every result carries, and the cache of compiled programs."""

import dataclasses
import hashlib
import os
import platform
import warnings
from importlib.metadata import version

import jax

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.native.processor import NO_KERNELS, cpu_facts, find_compiler, has_tiles
from detspec.schedule import Budget, FastPath, Numerics, Schedule

# Canonical passes by platform.
DEFAULT_SCHEDULES = {
    "cpu": Schedule(
        Numerics(page=64, query_tile=16, cache_dtype="float32", implementation="cpu", linear="pinned"), Budget(64, 16)
    ),
    "gpu": Schedule(Numerics(page=128, query_tile=16, cache_dtype="bfloat16"), Budget(256, 16)),
    "tpu": Schedule(Numerics(page=128, query_tile=16, cache_dtype="bfloat16"), Budget(256, 16)),
}
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that hold flags of XLA's compilers
HOPPER = "9.0"  # compute capability of the GPU kernels' instructions; Blackwell has other instructions
NO_BFLOAT16 = ("5.", "6.", "7.")  # compute capabilities before Ampere's 8.0 begin so: no arithmetic in bfloat16
WIDE_HEAD_DIM = 256
WIDE_HEAD_PAGE = 64  # longest page of such wide heads that fits into a Hopper GPU's shared memory
TILE_ROWS = 128  # query rows that a Hopper GPU's registers hold: positions of a tile times query heads per KV head

# The frozen `FastPath` (`block_pages`, `splits`) of decoding, by a substring of the device's kind. Two pages per step keep a
# TPU's registers busy; two splits keep both TensorCores of a v4 or v5p (kind "TPU v5") busy for one sequence. On a GPU a
# sequence takes `K * splits` thread blocks for 132 processors: 8 heads x 16. Those of GPUs were measured on an H200, at 0.65 of
# a copy's speed for one sequence of 32768 and 0.93 for 32 of 4096; the others were not.
FAST_PATHS = {"TPU v4": (2, 2), "TPU v5 lite": (2, 1), "TPU v5": (2, 2), "TPU v6": (2, 1), "TPU7x": (2, 1), "NVIDIA H": (1, 16)}


def schedule_for(
    platform: str, device_kind: str, capability: str = "", cfg: ModelConfig | None = None, *, warns: bool = True
) -> Schedule:
    """The default schedule of a device, for a model if one is given; it uses kernels if the device has them.

    `platform` is "cpu", "gpu" or "tpu", and `device_kind` as jax names it. GPUs of another compute `capability` than Hopper's
    "9.0" run the reference attention and XLA's products, held still by options (`detspec.held`), and warn unless `warns` is
    False. GPUs without bfloat16 arithmetic keep keys and values in the dtype that they are made in, as CPUs do, without a model
    in float16. On a Hopper GPU, wide heads need shorter pages, and many query heads per KV head shorter tiles.
    """
    schedule = DEFAULT_SCHEDULES[platform]
    is_integer = cfg is not None and cfg.is_integer
    if platform == "cpu" and find_compiler() is None:
        warnings.warn(
            f"{NO_KERNELS}. Without them XLA's products and the reference attention run, which are slower", stacklevel=2
        )
        schedule = schedule.with_numerics(implementation="reference", linear="xla")
        return schedule.with_numerics(cache_dtype="int8") if is_integer else schedule
    if is_integer:  # for speed alone: no bit depends on it
        kernels = {"implementation": "pallas_gpu", "linear": "pinned"} if platform == "gpu" and capability == HOPPER else {}
        return schedule.with_numerics(**{"linear": "xla", **kernels}, cache_dtype="int8")
    if platform == "cpu" and cfg is not None:
        return schedule.with_numerics(cache_dtype=cfg.dtype)  # keys and values are of this dtype, so nothing is rounded
    if platform == "gpu" and capability != HOPPER:
        if warns:
            warnings.warn(_without_kernels(device_kind, capability, cfg), stacklevel=2)
        if capability.startswith(NO_BFLOAT16):
            schedule = schedule.with_numerics(cache_dtype="float16" if cfg is None else cfg.dtype)
    elif platform != "cpu":
        block_pages, splits = next((blocks for kind, blocks in FAST_PATHS.items() if kind in device_kind), (1, 1))
        schedule = schedule.with_numerics(implementation=f"pallas_{platform}")
        schedule = dataclasses.replace(schedule, fast_path=FastPath(block_pages, splits))
        if platform == "gpu":
            schedule = schedule.with_numerics(linear="pinned")
        if platform == "gpu" and cfg is not None:
            schedule = dataclasses.replace(schedule, numerics=schedule.numerics.for_weights(cfg.dtype))
            mixers = [kind.mixer for kind in cfg.kinds if hasattr(kind.mixer, "head_dim")]
            fits = max(1, min(TILE_ROWS * mixer.num_kv_heads // mixer.num_heads for mixer in mixers))
            schedule = schedule.with_numerics(
                page=WIDE_HEAD_PAGE if any(mixer.head_dim >= WIDE_HEAD_DIM for mixer in mixers) else schedule.numerics.page,
                query_tile=min(schedule.numerics.query_tile, 1 << (fits.bit_length() - 1)),
            )
    return schedule


def default_schedule(cfg: ModelConfig | None = None) -> Schedule:
    """The schedule of this process's default device, for a model if one is given."""
    device = jax.devices()[0]
    return schedule_for(device.platform, device.device_kind, getattr(device, "compute_capability", ""), cfg)


def chosen_schedule(schedule: Schedule | None, cfg: ModelConfig) -> Schedule:
    """`schedule`, or the default one for `cfg` if it is None.

    Raises `InputError` if this process's device cannot run the implementation that `schedule` names, or that has no products of
    the model's dtype.
    """
    if schedule is None:
        return default_schedule(cfg)
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "")
    name = schedule.numerics.implementation
    on_hopper = device.platform == "gpu" and capability == HOPPER
    runs = {"reference": True, "cpu": device.platform == "cpu", "pallas_tpu": device.platform == "tpu", "pallas_gpu": on_hopper}
    if not schedule.numerics.interpret and not runs[name]:
        needed = {"cpu": "a CPU", "pallas_tpu": "a TPU", "pallas_gpu": f"a GPU of compute capability {HOPPER} (Hopper)"}[name]
        raise InputError(
            f"Numerics.implementation {name!r} needs {needed}, but this process runs on {device.device_kind}: "
            'use "reference", or interpret=True for a slow simulation'
        )
    if not cfg.is_integer and schedule.numerics != schedule.numerics.for_weights(cfg.dtype):
        raise InputError(
            f'the pinned products of "pallas_gpu" take weights in bfloat16 or float16, and the model has {cfg.dtype}: '
            'use Numerics.linear "xla", or convert the model'
        )
    return schedule


def fingerprint() -> dict[str, str]:
    """Facts that committed bits may depend on besides model, request, schedule and mesh: device kind and compiler versions.

    On a CPU the instruction sets belong to it, too: XLA compiles for them, and a virtual machine may hide some of them.
    A system or a compiler may also keep the kernels from a processor's matrix tiles. On GPUs and TPUs the flags of their
    compilers are named. On a GPU an engine adds the options of its programs, see `detspec.held`.
    """
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    facts = cpu_facts() if on_cpu else {}
    flags = (facts.get("flags") or facts.get("Features", "")) + (" with matrix tiles" if on_cpu and has_tiles() else "")
    return {
        "detspec": version("detspec"),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "backend": device.platform,
        "device_kind": _cpu_model(facts) if on_cpu else device.device_kind,
        "instruction_sets": hashlib.sha256(flags.encode()).hexdigest()[:16] if on_cpu else "",
        "compiler": device.client.platform_version.replace("\n", " "),
        **({} if on_cpu else {"flags": " ".join(os.environ[name] for name in FLAGS if os.environ.get(name))}),
    }


def widens(capability: str, cfg: ModelConfig) -> str:
    """Says what a GPU of this compute capability does with weights of `cfg` whose dtype it cannot multiply; "" if it can."""
    if cfg.dtype != "bfloat16" or cfg.weights is not None or not capability.startswith(NO_BFLOAT16):
        return ""
    return (
        "It has no arithmetic in bfloat16, so XLA widens the weights of each product to float32, every time: a model in "
        "float16 is faster (detspec convert --dtype float16)"
    )


def _without_kernels(device_kind: str, capability: str, cfg: ModelConfig | None) -> str:
    """Says what a GPU without kernels does."""
    said = (
        f"the GPU kernels are for compute capability {HOPPER} (Hopper); {device_kind} has {capability or 'none'}. It runs the "
        "reference attention and XLA's products, which are slower. Options of the programs keep them from being tuned"
    )
    more = "" if cfg is None else widens(capability, cfg)
    return f"{said}. {more}" if more else said


def _cpu_model(facts: dict[str, str]) -> str:
    """The name of the processor's model."""
    if not facts:
        return platform.processor() or platform.machine()
    model = facts.get("model name", platform.machine())
    return f"{model} family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
