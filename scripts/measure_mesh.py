#!/usr/bin/env python
"""Bytes of a model and its cache on a chip, and the time of a message between two processes.

Chips are simulated devices of one CPU. The first table compares bytes on the fullest chip with those on one chip alone, cut
into as many parts. Weights count, and page pools. Where there are fewer KV heads than chips, several chips hold the same
pages, and the weights of their keys and values. The second is `detspec.distributed.exchange` between two processes over gloo.
Engines of several processes call it after every eighth segment.

    python scripts/measure_mesh.py --chips 1 2 4 8 --messages 1000
"""

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

import jax

import detspec as ds
from detspec import distributed
from detspec.bench.bench import random_model
from detspec.engine.device import Device
from detspec.mesh import fitting_chips, make_mesh, param_specs, put
from detspec.presets import preset

MODELS = ("tiny_python", "random_100m")
MOST_OF_A_SHARE = 1.02  # of an equal part of what one chip holds
WARM_UP = 20  # messages that are not counted


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables; returns 1 if a chip holds more than its share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="numbers of chips")
    parser.add_argument("--messages", type=int, default=1000, metavar="N", help="number of messages")
    parser.add_argument("--measure", choices=("memory", "messages"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if min(*args.chips, args.messages) < 1:
        parser.error("--chips and --messages must be at least 1")
    if args.measure:
        found = memory(args.chips) if args.measure == "memory" else messages(args.messages)
        print(json.dumps(found))
        return 0
    (held,) = children("memory", args, [{"JAX_NUM_CPU_DEVICES": str(max(args.chips))}])
    print("| model | chips | weights, MB a chip | of an equal part | page pools, MB a chip | of what its KV heads need |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in held:
        mb = [f"{row[kind] / 1e6:.2f}" for kind in ("weights", "pages")]
        print(f"| {row['model']} | {row['chips']} | {mb[0]} | {row['of_part']:.4f} | {mb[1]} | {row['of_heads']:.4f} |")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    join = [
        {distributed.COORDINATOR: address, distributed.NUM_PROCESSES: "2", distributed.PROCESS_ID: str(number)}
        for number in range(2)
    ]
    took, _ = children("messages", args, join)
    print(f"\n{args.messages} messages between 2 processes, ms: median {took['median_ms']:.2f}, 99 % {took['p99_ms']:.2f}")
    whole = [row for row in held if row["kv"] == row["chips"]]  # elsewhere keys' and values' weights are copied, too
    is_kept = all(max(row["of_part"], row["of_heads"]) <= MOST_OF_A_SHARE for row in whole)
    return 0 if is_kept else 1


def children(what: str, args: argparse.Namespace, environments: Sequence[dict[str, str]]) -> list[Any]:
    """Runs this script at the same time in processes with these environments, and returns its outputs."""
    options = ["--measure", what, "--messages", str(args.messages), "--chips", *map(str, args.chips)]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, *options],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"a process that measures {what} has failed; its error stands above")
    return [json.loads(each.splitlines()[-1]) for each in said]


def memory(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """For each model and number of chips that fits it, bytes on the fullest chip, and over those that it should hold."""
    rows = []
    for name in MODELS:
        cfg = preset(name)
        whole: dict[str, int] = {}
        for chips in sorted({1, *sizes} & set(fitting_chips(cfg))):
            mesh = make_mesh(cfg, chips)
            kv = mesh.shape["kv"]
            model = random_model(cfg)
            model = dataclasses.replace(model, params=put(model.params, mesh, param_specs(cfg)))
            device = Device(model, ds.EngineConfig(max_requests=8, max_len=256))
            weights = fullest(model.params)
            pages = fullest(device.state.cache.pools)
            whole = whole or {"weights": weights * chips, "pages": pages * kv}
            rows.append(
                {
                    "model": name,
                    "chips": chips,
                    "kv": kv,
                    "weights": weights,
                    "pages": pages,
                    "of_part": weights * chips / whole["weights"],
                    "of_heads": pages * kv / whole["pages"],
                }
            )
    return rows


def fullest(tree: Any) -> int:
    """Most bytes of `tree` that one device holds."""
    held: Counter[Any] = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


def messages(number: int) -> dict[str, float]:
    """Milliseconds that this process waits for one message and its answer, when both come at once."""
    distributed.initialize()
    took = []
    for _ in range(WARM_UP + number):
        began = time.perf_counter()
        distributed.exchange(bytes(200))
        took.append(1e3 * (time.perf_counter() - began))
    took = took[WARM_UP:]
    return {"median_ms": median(took), "p99_ms": quantiles(took, n=100)[-1]}


if __name__ == "__main__":
    sys.exit(main())
