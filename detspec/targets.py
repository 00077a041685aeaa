"""Devices that programs can be compiled for without having one: their figures, and the vendors' compilers.

1. `target(name)` looks up a device in `TARGETS`: its memory, bandwidth and arithmetic.
2. `compile_for(target, fn, *shapes)` compiles `fn` for it, with libtpu or XLA's CUDA plugin, on any machine with a CPU.

A target is one device as JAX counts them, which is not always one chip:

    v4       a TensorCore, half a chip       the compiler has no megacore topology, which v4 hosts use by default
    v5p      a chip, both its TensorCores    megacore
    tpu7x    a TensorCore, half a chip       a chip is two devices on hosts, too
    others   a chip

This module touches no device, but jax does if it finds one of the platform that it compiles for. Set `jax_platforms` to "cpu"
before to prevent that, as `detspec plan` does.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from detspec.config import ModelConfig, is_count
from detspec.environment import HOPPER, schedule_for
from detspec.errors import InputError
from detspec.schedule import Schedule

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10
GB = 10**9
TERA = 10**12
GPU_SHARE = 0.75  # share of a GPU's memory that jax takes by default: docs.jax.dev, "GPU memory allocation"
INSTALL = "pip install 'detspec[aot]'"


@dataclasses.dataclass(frozen=True)
class Target:
    """One device."""

    name: str  # name that users give: a TPU slice by generation and topology, or a GPU
    platform: str  # "tpu" or "gpu"
    kind: str  # name that jax gives
    device: str  # part of the chip that one device is
    hbm_bytes: int  # memory of the device
    usable_bytes: int  # memory that programs may use, by the TPU compiler or by the share that jax takes of a GPU by default
    bytes_per_s: int  # peak bandwidth of the memory
    flop_per_s: int  # peak arithmetic of dense bfloat16 products that are summed in float32
    on_chip_bytes: int  # most memory of one kernel: VMEM of one TensorCore, or shared memory of one thread block
    link_bytes_per_s: int  # what one link of a chip brings in, see `interconnect`
    l2_bytes: int = 0  # L2 cache of a GPU, which its compiler needs to know


def _hopper(name: str, hbm_bytes: int, bytes_per_s: int) -> Target:
    """A Hopper GPU; the models differ in memory alone."""
    usable = int(GPU_SHARE * hbm_bytes)
    kind = f"NVIDIA {name.upper()}"
    flop_per_s = 1979 * TERA // 2
    return Target(name, "gpu", kind, "one GPU", hbm_bytes, usable, bytes_per_s, flop_per_s, 227 * KIB, 450 * GB, 50 * MIB)


# TPUs: memory, bandwidth and peak of a chip come from docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, halved if the
# device is half a chip; VMEM comes from docs.jax.dev, "TPU Hardware Reference". Usable memory is what libtpu's compiler reports
# for a program that needs more. GPUs: NVIDIA's data sheets of the SXM versions; their peaks include sparsity, so they are
# halved. Shared memory comes from the CUDA C++ Programming Guide, compute capability 9.0, L2 from the H100 white paper.
# Links: jax-ml.github.io/scaling-book, "All about TPUs"; of tpu7x, 1200 GB/s of a chip over 6 links of two directions. NVLink:
# 900 GB/s in both directions, by NVIDIA's data sheets.
HALF = "one TensorCore, half a chip"
CHIP = "one chip"
TARGETS = {
    target.name: target
    for target in (  # memory, usable memory, bytes/s, FLOP/s, on chip, link
        Target("v4:2x2x1", "tpu", "TPU v4", HALF, 16 * GIB, int(15.25 * GIB), 600 * GB, 275 * TERA // 2, 16 * MIB, 45 * GB),
        Target("v5e:2x2", "tpu", "TPU v5 lite", CHIP, 16 * GIB, int(15.75 * GIB), 819 * GB, 197 * TERA, 128 * MIB, 45 * GB),
        Target("v5p:2x2x1", "tpu", "TPU v5", CHIP, 95 * GIB, 95 * GIB, 2765 * GB, 459 * TERA, 64 * MIB, 90 * GB),
        Target("v6e:2x2", "tpu", "TPU v6 lite", CHIP, 32 * GIB, int(31.24 * GIB), 1640 * GB, 918 * TERA, 128 * MIB, 90 * GB),
        Target(
            "tpu7x:2x2x1", "tpu", "TPU7x", HALF, 96 * GIB, int(94.74 * GIB), 3690 * GB, 2307 * TERA // 2, 64 * MIB, 100 * GB
        ),
        _hopper("h100", 80 * GB, 3350 * GB),
        _hopper("h200", 141 * GB, 4800 * GB),
    )
}

# Facts about the missing host that the compilers ask for. `ALLOW...` lets several processes load libtpu, which otherwise locks
# a machine's TPUs; `JAX_SKIP...` stops the CUDA plugin from looking for cuDNN.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
CUDA_WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-runtime")  # ptxas, libdevice, the runtime's version


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program for a target."""

    program: jax.stages.Compiled  # jax's compiled program; it cannot run on this machine
    seconds: float  # time of compilation without tracing
    argument_bytes: int  # device memory of the arguments, as reported by the compiler, like all that follows
    output_bytes: int  # device memory of the outputs
    alias_bytes: int  # memory of outputs that reuse an argument's memory; counted in `output_bytes`, too
    temp_bytes: int  # device memory of temporaries
    code_bytes: int  # device memory of the code
    flop: float | None  # an estimate that counts a loop's body once and knows little of kernels; None on GPUs
    accessed_bytes: float | None  # the same for memory traffic

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the program, including its arguments."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes + self.code_bytes

    @property
    def hlo(self) -> str:
        """The optimised program as text."""
        return self.program.as_text() or ""

    def numbers(self) -> dict[str, float | None]:
        """All fields except the program, ready for JSON."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "program"}


def target(name: str) -> Target:
    """The target named `name`: one of `TARGETS`, or a device of another slice of such TPUs, as "v5p:2x2x2" or "v6e:4x4".

    Raises `InputError` if there is none.
    """
    generation, _, topology = name.partition(":")
    for known in TARGETS.values():
        like, _, shape = known.name.partition(":")
        if name == known.name:
            return known
        if (
            shape
            and generation == like
            and re.fullmatch(r"[1-9]\d{0,2}(x[1-9]\d{0,2})*", topology)
            and topology.count("x") == shape.count("x")
        ):
            if any(int(size) % 2 for size in topology.split("x")[:2]):
                raise InputError(
                    f"no slice {name!r}: hosts have 2x2 chips, so the first two sizes must be even, as in {known.name}"
                )
            return dataclasses.replace(known, name=name)
    raise InputError(
        f"unknown target {name!r}; accepted are {', '.join(TARGETS)}, and these TPUs in slices of other sizes, as v5p:2x2x2"
    )


def canonical_schedule(
    target: Target, cfg: ModelConfig | None = None, *, window: int | None = None, groups: int | None = None
) -> Schedule:
    """The default schedule of canonical passes on `target`, for a model if one is given.

    The budget is `groups` windows of `window`. Without `groups` it has as many windows as the default has rows for.

    Raises `InputError` if `window` is not a power of two, or `groups` is less than 1.
    """
    default = schedule_for(target.platform, target.kind, HOPPER if target.platform == "gpu" else "", cfg)
    window = default.budget.window if window is None else window
    if not is_count(window) or window & (window - 1):
        raise InputError(f"the window must be a power of two, got {window!r}")
    groups = max(1, default.budget.rows // window) if groups is None else groups
    if not is_count(groups):
        raise InputError(f"a canonical pass must have at least 1 window (group), got {groups!r}")
    return default.with_budget(groups * window, window)


def compile_for(target: Target, fn: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> Compiled:
    """Compiles `fn(*args)`, which `jax.jit` accepts, for one device of `target`, or for those that `args` lie on.

    `args` are pytrees of `jax.ShapeDtypeStruct`; nothing is allocated. They lie on devices of `devices_of` if they have
    shardings; all figures are then those of one device. The program may overwrite those at the positions `donate`.

    Raises `InputError` if a package that is needed is not installed, or does not match jax's version.
    """
    if all(leaf.sharding is None for leaf in jax.tree.leaves(args)):
        sharding = SingleDeviceSharding(device_of(target))
        args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), args)
    lowered = jax.jit(fn, donate_argnums=tuple(donate)).lower(*args)
    began = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - began
    memory = program.memory_analysis()
    assert memory is not None  # both compilers report it
    cost = program.cost_analysis() or {}
    return Compiled(
        program=program,
        seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        flop=cost.get("flops"),
        accessed_bytes=cost.get("bytes accessed"),
    )


def device_of(target: Target) -> Any:
    """The first of `devices_of`."""
    return devices_of(target, 1)[0]


def devices_of(target: Target, gpus: int) -> list[Any]:
    """Descriptions of all devices of a TPU slice, in jax's order, or of `gpus` GPUs of one host.

    Programs can be compiled for them but not run on them.

    Raises `InputError` if a package that is needed is not installed, or does not match jax's version.
    """
    _check_installed(target.platform)
    with _environment():
        if target.platform == "tpu":
            return list(topologies.get_topology_desc(platform="tpu", topology_name=target.name).devices)
        try:
            config = _gpu_config(target)
            described = topologies.get_topology_desc(
                platform="cuda", topology_name=target.name, target_config=config, topology=f"1x1x{gpus}"
            )
        except NotImplementedError as error:
            raise InputError(
                "jax's CUDA plugin did not load; to compile for a GPU without having one, set JAX_PLATFORMS=cpu and start again"
            ) from error
        return list(described.devices)


def compilers() -> dict[str, str]:
    """Versions of the packages that compile for targets; "" for missing ones."""
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", *CUDA_WHEELS)
    return {package: _version(package) for package in packages}


def _check_installed(platform: str) -> None:
    """Raises `InputError` unless all packages that compile for `platform` are installed."""
    needed = ["libtpu"] if platform == "tpu" else ["jax-cuda13-plugin", "jax-cuda13-pjrt"]
    if platform == "gpu" and shutil.which("ptxas") is None:
        needed += CUDA_WHEELS
    if missing := [package for package in needed if not _version(package)]:
        raise InputError(f"compiling for a {platform.upper()} needs {', '.join(missing)}, not installed: {INSTALL}")
    if platform == "gpu" and _version("jax-cuda13-plugin") != _version("jaxlib"):
        raise InputError(
            f"jax-cuda13-plugin has version {_version('jax-cuda13-plugin')}, jaxlib {_version('jaxlib')}; they must be equal: "
            f"{INSTALL}"
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Sets the variables of `ENVIRONMENT` that are not set, while the compilers load."""
    added = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _gpu_config(target: Target) -> str:
    """The `GpuTargetConfigProto` of a Hopper GPU in text form."""
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: 9 minor: 0 }}
          core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: {48 * KIB} shared_memory_per_block_optin: {target.on_chip_bytes}
          shared_memory_per_core: {228 * KIB}
          memory_bandwidth: {target.bytes_per_s} device_memory_size: {target.hbm_bytes} l2_cache_size: {target.l2_bytes}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
        device_description_str: "NVIDIA {target.name.upper()}"
    """
