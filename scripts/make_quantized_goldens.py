"""Writes tests/checkpoint/goldens_quantized: small matrices packed by AutoAWQ and AutoGPTQ, and what these make of them.

    pip download --no-deps autoawq==0.2.9 auto-gptq==0.7.1      # archives; unpack both into one folder
    python scripts/make_quantized_goldens.py FOLDER              # in an environment with torch

Both packages are no longer maintained and do not install next to a new torch, so single modules of theirs are imported.
"""

import importlib
import sys
import types
from pathlib import Path

import numpy as np
import torch

TARGET = Path(__file__).parents[1] / "tests" / "checkpoint" / "goldens_quantized"
OUTS, INS, GROUP = 64, 96, 32


def module_of(root: Path, name: str) -> types.ModuleType:
    """The module `name` below `root`, without what the packages above it import."""
    *parents, _ = name.split(".")
    for depth in range(1, len(parents) + 1):
        package = types.ModuleType(".".join(parents[:depth]))
        package.__path__ = [str(root.joinpath(*parents[:depth]))]
        sys.modules[package.__name__] = package
    return importlib.import_module(name)


def linear_and_groups(bits: int, lowest_zero: int) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A random layer in whole numbers of its scales, with scales and zero points `[in / GROUP, out]`."""
    generator = torch.Generator().manual_seed(bits)
    scales = (0.01 + 0.02 * torch.rand(INS // GROUP, OUTS, generator=generator)).half().float()
    zeros = torch.randint(lowest_zero, 2**bits, scales.shape, generator=generator).float()
    numbers = torch.randint(0, 2**bits, (INS, OUTS), generator=generator)
    weight = (numbers - zeros.repeat_interleave(GROUP, 0)) * scales.repeat_interleave(GROUP, 0)
    linear = torch.nn.Linear(INS, OUTS, bias=False)
    linear.weight.data = weight.t().contiguous()
    return linear, scales, zeros


def save(name: str, stored: dict[str, torch.Tensor], dequantized: torch.Tensor) -> None:
    """Writes stored tensors and the matrix `[out, in]` that the library makes of them."""
    TARGET.mkdir(exist_ok=True)
    arrays = {key: tensor.numpy() for key, tensor in stored.items()}
    np.savez_compressed(TARGET / f"{name}.npz", dequantized=dequantized.numpy(), **arrays)


def awq(root: Path) -> None:
    """AutoAWQ's gemm layer, and its function that undoes the packing."""
    linear, scales, zeros = linear_and_groups(4, 0)
    gemm = module_of(root, "awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")
    layer = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales, zeros=zeros)
    stored = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
    save("autoawq", stored, packing.dequantize_gemm(**stored, bits=4, group_size=GROUP).t())


def gptq(root: Path, bits: int) -> None:
    """AutoGPTQ's layer; the identity through it in float16 gives its matrix. It cannot pack zero points of 0."""
    linear, scales, zeros = linear_and_groups(bits, 1)
    layer = module_of(root, "auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear(bits, GROUP, INS, OUTS, bias=False)
    g_idx = torch.arange(INS, dtype=torch.int32) // GROUP
    layer.pack(linear.half(), scales.t(), zeros.t(), g_idx)  # scales take the dtype of the weight
    layer.use_cuda_fp16 = False
    stored = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "g_idx": layer.g_idx}
    save(f"autogptq_{bits}", stored, layer(torch.eye(INS, dtype=torch.float16)).t())


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    awq(folder)
    gptq(folder, 4)
    gptq(folder, 8)
