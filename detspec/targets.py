"""Devices that programs can be compiled for without having one, by `target_compilers`: memory, bandwidth, arithmetic, links.

A target is one device as JAX counts them, which is not always one chip:

    v4       a TensorCore, half a chip       the compiler has no megacore topology, which v4 hosts use by default
    v5p      a chip, both its TensorCores    megacore
    tpu7x    a TensorCore, half a chip       a chip is two devices on hosts, too
    others   a chip
"""

import dataclasses
import re

from detspec.config import ModelConfig, is_count
from detspec.environment import schedule_for
from detspec.errors import InputError
from detspec.schedule import Schedule

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10
GB = 10**9
TERA = 10**12
NO_RESERVE = ("7.5",)  # compute capabilities whose thread blocks may have all shared memory of a processor
GPU_SHARE = 0.75  # share of a GPU's memory that jax takes by default: docs.jax.dev, "GPU memory allocation"


@dataclasses.dataclass(frozen=True)
class Processors:
    """Facts about a GPU's processors that its compiler asks for."""

    capability: str  # compute capability
    num: int
    lanes: int  # float32 units of one
    clock_ghz: float
    threads: int  # most threads on one
    shared_bytes: int  # shared memory of one
    l2_bytes: int  # L2 cache of all


@dataclasses.dataclass(frozen=True)
class Target:
    """A device that programs can be compiled for."""

    name: str  # name that users give: a TPU slice by generation and topology, or a GPU
    platform: str  # "tpu" or "gpu"
    kind: str  # name that jax gives
    device: str  # part of the chip that one device is
    hbm_bytes: int  # memory of the device
    usable_bytes: int  # memory that programs may use, by the TPU compiler or by the share that jax takes of a GPU by default
    bytes_per_s: int  # peak bandwidth of the memory
    flop_per_s: int  # peak arithmetic of dense products summed in float32: of bfloat16, or of float16 where there is no other
    on_chip_bytes: int  # most memory of one kernel: VMEM of one TensorCore, or shared memory of one thread block
    link_bytes_per_s: int  # rate at which a link of a chip brings in bytes, see `roofline`; 0 without links
    gpu: Processors | None = None  # processors of a GPU; None on a TPU


def _gpu(
    name: str, kind: str, hbm_bytes: int, bytes_per_s: int, flop_per_s: int, link_bytes_per_s: int, processors: Processors
) -> Target:
    """A GPU. A thread block may have all shared memory of a processor, but for 1 KiB from compute capability 8.0 on."""
    reserved = 0 if processors.capability in NO_RESERVE else KIB
    return Target(
        name=name,
        platform="gpu",
        kind=kind,
        device="one GPU",
        hbm_bytes=hbm_bytes,
        usable_bytes=int(GPU_SHARE * hbm_bytes),
        bytes_per_s=bytes_per_s,
        flop_per_s=flop_per_s,
        on_chip_bytes=processors.shared_bytes - reserved,
        link_bytes_per_s=link_bytes_per_s,
        gpu=processors,
    )


# TPUs: memory, bandwidth and peak of a chip come from docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, halved if the
# device is half a chip; VMEM comes from docs.jax.dev, "TPU Hardware Reference". Usable memory is what libtpu's compiler reports
# for a program that needs more. GPUs: NVIDIA's data sheets, of an H100, H200 and A100 (40 GB) those of the SXM versions; where
# their peaks include sparsity, they are halved. Threads and shared memory of a processor come from the CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability". Numbers of processors, clocks and L2 come from NVIDIA's white papers
# on Turing, Ampere (A100), Ada and Hopper; an L4's L2 comes from its data sheet. What stands here of T4, L4 and A100 was
# written from memory of these papers, and is yet to be compared with them.
# Links: jax-ml.github.io/scaling-book, "All about TPUs"; of tpu7x, 1200 GB/s of a chip over 6 links of two directions. NVLink:
# 900 and 600 GB/s in both directions, by NVIDIA's data sheets. A T4 and an L4 have none, only PCIe.
HALF = "one TensorCore, half a chip"
CHIP = "one chip"
HOPPER_SXM = Processors("9.0", num=132, lanes=128, clock_ghz=1.98, threads=2048, shared_bytes=228 * KIB, l2_bytes=50 * MIB)
A100_SXM = Processors("8.0", num=108, lanes=64, clock_ghz=1.41, threads=2048, shared_bytes=164 * KIB, l2_bytes=40 * MIB)
L4 = Processors("8.9", num=58, lanes=128, clock_ghz=2.04, threads=1536, shared_bytes=100 * KIB, l2_bytes=48 * MIB)
T4 = Processors("7.5", num=40, lanes=64, clock_ghz=1.59, threads=1024, shared_bytes=64 * KIB, l2_bytes=4 * MIB)
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
        # memory, bytes/s, FLOP/s, link
        _gpu("t4", "Tesla T4", 16 * GB, 320 * GB, 65 * TERA, 0, T4),
        _gpu("l4", "NVIDIA L4", 24 * GB, 300 * GB, 242 * TERA // 2, 0, L4),
        _gpu("a100", "NVIDIA A100-SXM4-40GB", 40 * GB, 1555 * GB, 624 * TERA // 2, 300 * GB, A100_SXM),
        _gpu("h100", "NVIDIA H100", 80 * GB, 3350 * GB, 1979 * TERA // 2, 450 * GB, HOPPER_SXM),
        _gpu("h200", "NVIDIA H200", 141 * GB, 4800 * GB, 1979 * TERA // 2, 450 * GB, HOPPER_SXM),
    )
}


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
    default = schedule_for(target.platform, target.kind, target.gpu.capability if target.gpu else "", cfg, warns=False)
    window = default.budget.window if window is None else window
    if not is_count(window) or window & (window - 1):
        raise InputError(f"the window must be a power of two, got {window!r}")
    groups = max(1, default.budget.rows // window) if groups is None else groups
    if not is_count(groups):
        raise InputError(f"a canonical pass must have at least 1 window (group), got {groups!r}")
    return default.with_budget(groups * window, window)
