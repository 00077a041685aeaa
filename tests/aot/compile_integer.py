"""Costs of decoding steps of integers as compilers count them, over bfloat16's: two layers of an 8B shape, 1 and 32 requests.

    .venv/aot/bin/python tests/aot/compile_integer.py --targets v5e:2x2 v6e:2x2 h100

Bytes are those that the compiler says instructions access: what stays on the chip counts, and a look-up may count its whole
table for each row. Cycles are the sum of its estimates for instructions of a TPU's program; those of a loop count once, and
kernels have none. Compile nothing else meanwhile.
"""

import argparse
import os
import re
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax must not look for the devices compiled for

import time

import compile_proof  # noqa: F401  # finds what stages of scripts/prove_on_device.py are made of
from jax.sharding import SingleDeviceSharding
from prove_stages.programs import engine_programs

from detspec.config import ModelConfig
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs, needed_plans
from detspec.model.dense import dense_config
from detspec.model.to_integer import integer_config
from detspec.target_compilers import compilers, device_of
from detspec.targets import canonical_schedule, target

LAYERS = dense_config(32_768, 4096, 2, 32, 8, 128, 14_336, dtype="bfloat16")
KINDS = {"bfloat16": LAYERS, "integer": integer_config(LAYERS, 15), "integer8": integer_config(LAYERS, 8)}
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["v5e:2x2", "v6e:2x2", "h100"], metavar="NAME", help="targets")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 32], metavar="N", help="requests of a step")
    args = parser.parse_args(argv)
    print(compilers())
    print(f"{'target':12}{'requests':>9} {'model':10}{'compile s':>11}{'GFLOP':>9}{'MB':>13}{'cycles':>11}   over bfloat16")
    for name in args.targets:
        for requests in args.requests:
            of_floats: tuple[float, ...] = ()
            for kind, cfg in KINDS.items():
                seconds, *found = compiled(name, cfg, requests)
                of_floats = of_floats or tuple(found)
                flops, accessed, cycles = found
                ratios = [f"{here / there:.2f}" if there else "-" for here, there in zip(found, of_floats, strict=True)]
                print(
                    f"{name:12}{requests:9} {kind:10}{seconds:11.1f}{flops / 1e9:9.2f}{accessed / 1e6:13.1f}{cycles:11.0f}   "
                    + ", ".join(ratios),
                    flush=True,
                )


def compiled(name: str, cfg: ModelConfig, requests: int) -> tuple[float, float, float, float]:
    """Seconds to compile a step, and what the compiler counts: operations, bytes and cycles."""
    needs = Needs(deterministic=True, ordinary=False, processing=False)
    schedule = canonical_schedule(target(name), cfg)
    config = EngineConfig(max_requests=requests, max_len=1024, method="none", schedule=schedule)
    plans = [plan for plan in needed_plans(config, schedule, requests, needs) if not plan.ordinary]
    widest = max(plans, key=lambda plan: plan.batch)
    program = next(each for each in engine_programs(cfg, config, [widest], name="engine") if "run_segment" in each.name)
    lowered = program.lower(SingleDeviceSharding(device_of(target(name))))
    began = time.perf_counter()
    done = lowered.compile()
    seconds = time.perf_counter() - began
    cost = done.cost_analysis() or {}
    cycles = sum(map(int, CYCLES.findall(done.as_text())))
    return seconds, cost.get("flops", 0.0), cost.get("bytes accessed", 0.0), float(cycles)


if __name__ == "__main__":
    main()
