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
from detspec.environment import HOPPER, schedule_for
from detspec.errors import InputError
from detspec.schedule import Schedule

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10
GB = 10**9
TERA = 10**12
GPU_SHARE = 0.75  # share of a GPU's memory that jax takes by default: docs.jax.dev, "GPU memory allocation"


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
