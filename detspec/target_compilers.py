"""The vendors' compilers on a machine without their devices: libtpu for TPUs, XLA's CUDA plugin for GPUs.

This module touches no device, but jax does if it finds one of the platform that it compiles for. Set `jax_platforms` to "cpu"
before to prevent that, as `detspec plan` does.
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from detspec.errors import InputError
from detspec.extras import install_command
from detspec.targets import KIB, Target

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
    accessed_bytes: float | None  # bytes of memory traffic, an estimate like `flop`

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


def compile_for(
    target: Target, fn: Callable[..., Any], *args: Any, donate: Sequence[int] = (), options: Mapping[str, Any] | None = None
) -> Compiled:
    """Compiles `fn(*args)`, which `jax.jit` accepts, for one device of `target`, or for those that `args` lie on.

    `args` are pytrees of `jax.ShapeDtypeStruct`; nothing is allocated. They lie on devices of `devices_of` if they have
    shardings; all figures are then those of one device. The program may overwrite those at the positions `donate`. `options`
    are the compiler's, as `detspec.held.compiler_options` has them.

    Raises `InputError` if a package that is needed is not installed, or does not match jax's version.
    """
    if all(leaf.sharding is None for leaf in jax.tree.leaves(args)):
        sharding = SingleDeviceSharding(device_of(target))
        args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), args)
    lowered = jax.jit(fn, donate_argnums=tuple(donate)).lower(*args)
    began = time.perf_counter()
    program = lowered.compile(compiler_options=dict(options or {}))
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
        raise InputError(
            f"compiling for a {platform.upper()} needs {', '.join(missing)}, not installed: {install_command('aot')}"
        )
    if platform == "gpu" and _version("jax-cuda13-plugin") != _version("jaxlib"):
        raise InputError(
            f"jax-cuda13-plugin has version {_version('jax-cuda13-plugin')}, jaxlib {_version('jaxlib')}; they must be equal: "
            f"{install_command('aot')}"
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
    """The `GpuTargetConfigProto` of a GPU in text form."""
    gpu = target.gpu
    assert gpu is not None
    major, minor = gpu.capability.split(".")
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {gpu.num} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock_ghz}
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: {48 * KIB} shared_memory_per_block_optin: {target.on_chip_bytes}
          shared_memory_per_core: {gpu.shared_bytes}
          memory_bandwidth: {target.bytes_per_s} device_memory_size: {target.hbm_bytes} l2_cache_size: {gpu.l2_bytes}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
        device_description_str: "{target.kind}"
    """
