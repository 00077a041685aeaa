#!/usr/bin/env python
"""Measures loading a checkpoint: its time compared with reading the files, its peak memory compared with the weights.

Writes a sharded folder of random weights, then reads its files and loads it in turn. Each measurement runs in its own process,
with the files out of the page cache.

    python scripts/measure_load.py --gb 1 --folder /tmp/checkpoint
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the weights in 10^9 bytes")
    parser.add_argument("--shards", type=int, default=5, help="number of files")
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds; the median counts")
    parser.add_argument("--measure", choices=("read", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="folder for the checkpoint (default: a temporary folder)")
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps({"read": measure_read, "load": measure_load}[args.measure](Path(args.folder))))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary) / "checkpoint"
        size = write(folder, args.gb, args.shards)
        rounds = [{kind: run(kind, folder) for kind in ("read", "load")} for _ in range(args.repeats)]
        runs = {kind: [measured[kind] for measured in rounds] for kind in ("read", "load")}
    read_s, load_s = (median(r["seconds"] for r in runs[kind]) for kind in ("read", "load"))
    peak = max(r["peak_bytes"] for r in runs["load"])
    print(f"weights               {size / 1e9:8.2f} GB in {args.shards} files")
    print(f"reading the files     {read_s:8.2f} s   {size / 1e9 / read_s:.2f} GB/s, not from the page cache")
    print(f"detspec.load          {load_s:8.2f} s   {load_s / read_s:.2f} x reading")
    print(f"peak memory of load   {peak / 1e9:8.2f} GB  {peak / size:.2f} x the weights, above the memory before loading")
    return int(peak > 1.3 * size or load_s > 2 * read_s)


def write(folder: Path, gb: float, shards: int) -> int:
    """Writes a Llama-like model of about `gb` GB in bfloat16; returns its bytes."""
    import jax

    from detspec.checkpoint.hf import save_hf
    from detspec.model.params import init_params, num_params, params_bytes
    from detspec.presets import preset

    base = preset("random_100m")
    layer = 2 * (num_params(base) - 2 * base.vocab_size * base.d_model) / base.num_layers
    cfg = dataclasses.replace(base, num_layers=max(1, round((gb * 1e9 - 4 * base.vocab_size * base.d_model) / layer)))
    params = init_params(cfg, jax.random.key(0))
    save_hf(folder, cfg, params, max_shard_bytes=params_bytes(params) // shards + 1)
    return params_bytes(params)


def run(kind: str, folder: Path) -> dict[str, float]:
    """One measurement in a new process, after dropping the files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, "--measure", kind, "--folder", str(folder)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))


def measure_read(folder: Path) -> dict[str, float]:
    """Reads all files into memory and keeps them there."""
    began = time.perf_counter()
    contents = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
    assert contents
    return {"seconds": time.perf_counter() - began, "peak_bytes": 0}


def measure_load(folder: Path) -> dict[str, float]:
    """Loads the model; the peak memory does not count what the process used before."""
    import jax

    from detspec import load

    jax.block_until_ready(jax.numpy.ones(8) + 1)
    before = memory("VmRSS")
    began = time.perf_counter()
    jax.block_until_ready(load(folder).params)
    return {"seconds": time.perf_counter() - began, "peak_bytes": memory("VmHWM") - before}


def memory(key: str) -> int:
    """The value of one line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(key)))


if __name__ == "__main__":
    sys.exit(main())
