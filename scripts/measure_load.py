#!/usr/bin/env python
"""Measures loading a checkpoint: its time compared with reading the files, its peak memory compared with the weights.

Writes a sharded folder of random weights, then reads its files and loads it in turn. Each measurement runs in its own process,
with the files out of the page cache.

    python scripts/measure_load.py --gb 1 --folder /tmp/checkpoint

With `--devices 8`, matrices are cut along their rows for 8 devices of one process. What is in host memory besides the weights
is then compared with the largest shard, and the bytes read from the files with those of the shards. Two cores, devices of the
CPU, `--gb 0.3 --devices 8`: 4.2 MB besides the weights, 0.3 x the largest shard; 1.000 x the shards read. Time is judged for
one device alone, since eight devices of a CPU share its cores.

With `--experts 128`, a second folder has 48 layers of so many experts and about the same size, in many small tensors. It must
be loaded as fast as the first one, in bytes a second. Two busy cores, `--gb 2`: 18,867 tensors, 0.89 x the speed of 182; a
tensor costs about 20 us, so the rest is the number of tensors, not of bytes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from statistics import median
from typing import Any

from detspec.config import ModelConfig
from detspec.model.dense import dense_config, with_fields
from detspec.model.experts import MixtureOfExperts
from detspec.model.params import num_params

HEADER_BYTES = 4096  # of memory for the name and the place of a tensor


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the weights in 10^9 bytes")
    parser.add_argument("--shards", type=int, default=5, help="number of files")
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds; the median counts")
    parser.add_argument("--devices", type=int, default=1, help="number of devices of the CPU that the matrices are cut for")
    parser.add_argument("--experts", type=int, default=0, help="number of experts of each of 48 layers in a second folder")
    parser.add_argument("--measure", choices=("read", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="folder for the checkpoint (default: a temporary folder)")
    args = parser.parse_args(argv)
    if args.measure:
        folder = Path(args.folder)
        print(json.dumps(measure_read(folder) if args.measure == "read" else measure_load(folder, args.devices)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(args.folder or temporary)
        sizes = {root / "checkpoint": write(root / "checkpoint", dense(args.gb), args.shards)}
        if args.experts:
            sizes[root / "experts"] = write(root / "experts", of_experts(args.gb, args.experts), args.shards)
        rounds = [
            {folder: {kind: run(kind, folder, args.devices) for kind in ("read", "load")} for folder in sizes}
            for _ in range(args.repeats)
        ]
    judged = [judge([one[folder] for one in rounds], size, args.shards, args.devices) for folder, size in sizes.items()]
    speeds = [speed for speed, _ in judged]
    if args.experts:
        print(f"speed with experts    {speeds[1] / speeds[0]:8.2f} x that without, in bytes a second")
    return int(any(missed for _, missed in judged) or speeds[-1] < 0.85 * speeds[0])


def judge(rounds: list[dict[str, dict[str, float]]], size: int, shards: int, devices: int) -> tuple[float, bool]:
    """Prints what was measured of one folder; returns the bytes that are loaded in a second, and whether a bound is missed."""
    read_s, load_s = (median(one[kind]["seconds"] for one in rounds) for kind in ("read", "load"))
    loads = [one["load"] for one in rounds]
    peak = max(load["peak_bytes"] for load in loads)
    besides = max(0, peak - size)
    shard = loads[0]["shard_bytes"]
    read = loads[0]["read_bytes"]
    print(f"weights               {size / 1e9:8.2f} GB, {loads[0]['tensors']} tensors in {shards} files")
    print(f"reading the files     {read_s:8.2f} s   {size / 1e9 / read_s:.2f} GB/s, not from the page cache")
    print(f"detspec.load          {load_s:8.2f} s   {load_s / read_s:.2f} x reading")
    print(f"peak memory of load   {peak / 1e9:8.2f} GB  {peak / size:.2f} x the weights, above the memory before loading")
    print(f"besides the weights   {besides / 1e6:8.2f} MB  {besides / shard:.2f} x the largest shard; {devices} devices")
    print(f"read from the files   {read / 1e9:8.2f} GB  {read / size:.3f} x the shards")
    is_slow = devices == 1 and load_s > 2 * read_s
    most = 4 * shard + HEADER_BYTES * loads[0]["tensors"]
    return size / load_s, is_slow or peak > 1.3 * size or besides > most or read > 1.02 * size


def dense(gb: float) -> ModelConfig:
    """A Llama-like model of about `gb` GB in bfloat16, with matrices as large as those of 1B models."""
    one = dense_config(32000, 2048, 1, 16, 8, 128, 5632, tie_embeddings=True)
    layer = 2 * (num_params(one) - one.vocab_size * one.d_model)
    return with_fields(one, num_layers=max(1, round((gb * 1e9 - 2 * one.vocab_size * one.d_model) / layer)))


def of_experts(gb: float, num: int) -> ModelConfig:
    """A model like Qwen3-MoE of about `gb` GB in bfloat16, with three tensors for each expert of each layer."""
    width = max(8, round(gb * 1e9 / (48 * num * 3 * 256 * 2)))
    experts = MixtureOfExperts(num, active=min(8, num), d_ff=width, renormalised=True)
    return dense_config(4096, 256, 48, 4, 2, 64, 768, qk_norm=True, experts=experts, max_position=32768, norm_eps=1e-6)


def write(folder: Path, cfg: ModelConfig, shards: int) -> int:
    """Writes a folder of random weights; returns their bytes."""
    import jax

    from detspec.checkpoint.hf import save_hf
    from detspec.model.params import init_params, params_bytes

    params = init_params(cfg, jax.random.key(0))
    save_hf(folder, cfg, params, max_shard_bytes=params_bytes(params) // shards + 1)
    return params_bytes(params)


def run(kind: str, folder: Path, devices: int) -> dict[str, float]:
    """Measures in a new process, after dropping the files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, "--measure", kind, "--folder", str(folder), "--devices", str(devices)]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)} if devices > 1 else None
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    return dict(json.loads(printed.splitlines()[-1]))


def measure_read(folder: Path) -> dict[str, float]:
    """Reads all files into memory and keeps them there."""
    began = time.perf_counter()
    contents = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
    assert contents
    return {"seconds": time.perf_counter() - began}


def measure_load(folder: Path, devices: int) -> dict[str, float]:
    """Loads the model; the peak memory does not count what the process used before, nor the modules that loading imports."""
    import jax

    from detspec import load
    from detspec.checkpoint import shards

    sizes = []

    def counting(file: FileIO, begin: int, target: memoryview) -> None:
        sizes.append(len(target))
        read_bytes(file, begin, target)

    read_bytes, shards.read_bytes = shards.read_bytes, counting
    sharding = cut_by_rows(folder, devices) if devices > 1 else None
    jax.block_until_ready(jax.numpy.ones(8) + 1)
    began = time.perf_counter()
    from detspec.checkpoint import chat, hf, orbax_folder, tokenizer  # noqa: F401

    before = memory("VmRSS")
    params = jax.block_until_ready(load(folder, sharding=sharding).params)
    seconds = time.perf_counter() - began
    peak = memory("VmHWM") - before
    shard = max(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    tensors = len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
    return {"seconds": seconds, "peak_bytes": peak, "shard_bytes": shard, "read_bytes": sum(sizes), "tensors": tensors}


def cut_by_rows(folder: Path, devices: int) -> Any:
    """Shardings of the parameters: matrices cut along their rows, norms whole on each device."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from detspec.checkpoint.load import load_config
    from detspec.model.params import param_shapes

    mesh = jax.make_mesh((devices,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("model"))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: rows if len(leaf.shape) > 1 else whole, param_shapes(load_config(folder)))


def memory(key: str) -> int:
    """The value of one line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(key)))


if __name__ == "__main__":
    sys.exit(main())
