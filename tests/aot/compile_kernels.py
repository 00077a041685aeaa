"""Compiles every kernel at every named shape for every target; writes docs/kernels.md and docs/data/kernels.json.

make kernels                                                          # all, about five minutes on two cores
python tests/aot/compile_kernels.py --targets v6e:2x2 --out /tmp/k          # a part, elsewhere: /tmp/k/kernels.md, ...
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax must not look for the devices compiled for

from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir
from kernel_shapes import WITH_KERNELS, AttentionShape, KernelShape, attention_shapes, compile_shape, linear_shapes
from tqdm import tqdm

from detspec.target_compilers import Compiled, compilers
from detspec.targets import Target, target

DOCS = Path(__file__).parents[2] / "docs"
VMEM = re.compile(r'tpu_custom_call".*"used_scoped_memory_configs":\[{"memory_space":"1","offset":"\d+","size":"(\d+)"')
KERNEL_MODULE = re.compile(r'custom_call_target="mosaic_gpu.*?\bmodule = "(.*?)", \w+ = ')

INTRODUCTION = """# Kernels as compiled

Written by `make kernels`; `make test-aot` compiles a part: each shape of attention for one TPU and one GPU, and each kind of
layer, pass and number of rows for every target. The vendors' compilers ran on a machine without TPU or GPU: nothing here was
run. "On chip" is VMEM of a TPU's TensorCore as its compiler reports it, or the shared memory of a GPU's thread block, with its
share of the limit. "Temporaries" is device memory that the operations around the kernel need. GFLOP, MB and the least time at
the device's peaks are arithmetic, for windows at the end of full page tables; each query tile reads its pages once. The
compilers' own estimates are in the JSON; GPU compilers give none.
"""


def main() -> None:
    """Compiles the kernels and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(WITH_KERNELS), metavar="NAME", help="what to compile for")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR", help="folder for kernels.md and data/kernels.json")
    args = parser.parse_args()
    shapes = (*attention_shapes(), *linear_shapes())
    pairs = [(target(name), shape) for name in args.targets for shape in shapes]
    kernels = [row(device, shape) for device, shape in tqdm(pairs, unit="kernel", disable=None)]
    result = {"versions": compilers(), "kernels": kernels}
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    (args.out / "data" / "kernels.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (args.out / "kernels.md").write_text(page(result), encoding="utf-8")
    print(f"wrote kernels.md and data/kernels.json in {args.out}: {len(kernels)} kernels for {len(args.targets)} targets")


def row(device: Target, shape: KernelShape) -> dict[str, Any]:
    """The compiler's figures for one kernel, and the least work of its shape."""
    compiled = compile_shape(shape, device)
    schedule = shape.schedule(device)
    work = shape.work(schedule)
    return {
        "target": device.name,
        "shape": shape.name,
        "schedule": schedule_text(shape, device),
        "implementation": schedule.numerics.implementation,
        "on_chip_bytes": on_chip_bytes(compiled, device),
        "on_chip_limit_bytes": device.on_chip_bytes,
        "work_flop": work.flop,
        "work_bytes": work.bytes,
        "least_s": work.seconds(device),
        "bound": work.bound(device),
        **compiled.numbers(),
    }


def schedule_text(shape: KernelShape, device: Target) -> str:
    """The schedule's values that the kernel is built from."""
    if not isinstance(shape, AttentionShape):
        return "pinned"
    numerics = shape.schedule(device).numerics
    return f"page {numerics.page} x {numerics.block_pages}, tile {numerics.query_tile}, splits {numerics.num_splits}"


def on_chip_bytes(compiled: Compiled, device: Target) -> int:
    """VMEM bytes of a TPU kernel; bytes of shared memory that a GPU kernel is launched with."""
    hlo = compiled.program.as_text()
    return int(VMEM.search(hlo)[1]) if device.platform == "tpu" else launched_with(KERNEL_MODULE.search(hlo)[1])


def launched_with(escaped: str) -> int:
    """The dynamic shared memory of the `gpu.launch` in a Mosaic GPU module, given as HLO prints its bytecode."""
    bytecode = re.sub(
        rb"\\(\\|[0-9A-F]{2})", lambda byte: b"\\" if byte[1] == b"\\" else bytes([int(byte[1], 16)]), escaped.encode("latin-1")
    )
    context = mlir.make_ir_context()
    mosaic_gpu_dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        module = str(ir.Module.parse(bytecode))
    operand = re.search(r'gpu\.launch"\([^)]*(%\d+)\)', module)[1]  # the last one
    return int(re.search(rf'{operand} = "[\w.]+constant"\(\) <?{{value = (\d+) : i32}}', module)[1])


def page(result: dict[str, Any]) -> str:
    """The content of docs/kernels.md."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    lines = [INTRODUCTION, f"Versions: {versions}."]
    for name in dict.fromkeys(kernel["target"] for kernel in result["kernels"]):
        lines += [
            "",
            f"## {name}",
            "",
            "| shape | schedule | on chip | temporaries | GFLOP | MB | at least | bound by | compiled in |",
            "|---|---|---:|---:|---:|---:|---:|---|---:|",
            *(line(kernel) for kernel in result["kernels"] if kernel["target"] == name),
        ]
    return "\n".join(lines) + "\n"


def line(kernel: dict[str, Any]) -> str:
    """A row of a table."""
    share = kernel["on_chip_bytes"] / kernel["on_chip_limit_bytes"]
    cells = (
        kernel["shape"],
        kernel["schedule"],
        f"{kernel['on_chip_bytes'] / 1024:,.0f} KiB ({share:.0%})",
        f"{kernel['temp_bytes'] / 1e6:,.1f} MB",
        f"{kernel['work_flop'] / 1e9:,.2f}",
        f"{kernel['work_bytes'] / 1e6:,.1f}",
        f"{1e6 * kernel['least_s']:,.1f} us",
        kernel["bound"],
        f"{kernel['seconds']:.2f} s",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
