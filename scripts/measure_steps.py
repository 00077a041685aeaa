"""Deterministic decoding steps next to ordinary ones: milliseconds and their ratio, by the clock and by processor time.

    JAX_PLATFORMS=cpu python scripts/measure_steps.py --requests 1 8 32 --rounds 60

A sample is the time of long requests less that of requests of one token, over the steps between them; both kinds take turns, no
draft, no shared prompts. Neighbours on the same machine only ever add time, so low quantiles say most about the programs.
"""

import argparse
import time

import numpy as np

import detspec as ds
from detspec.bench.bench import bench_prompts, random_model
from detspec.compile_cache import enable_jax_cache
from detspec.presets import preset

PROMPT_LEN = 64
QUANTILES = (0.1, 0.25, 0.5)


def main() -> int:
    """Prints one line for each number of requests and quantile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", help="random weights of this shape (default: the shipped model)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="requests in flight")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens of the long requests")
    parser.add_argument("--rounds", type=int, default=60, help="rounds")
    args = parser.parse_args()
    enable_jax_cache()
    model = random_model(preset(args.preset)) if args.preset else ds.load()
    print("requests  quantile   clock: ordinary  deterministic  speed   processor: ordinary  deterministic  speed")
    for number in args.requests:
        deterministic, ordinary = samples(model, number, args.new_tokens, args.rounds)
        for quantile in QUANTILES:
            slow, fast = (np.quantile(x, quantile, axis=0) for x in (deterministic, ordinary))
            parts = (f"{o:17.3f}  {d:13.3f}  {o / d:5.3f}" for d, o in zip(slow, fast, strict=True))
            print(f"{number:8d}  {quantile:8.2f}" + "   ".join(parts), flush=True)
    return 0


def samples(model: ds.Model, number: int, new_tokens: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds of deterministic and of ordinary steps, each `[rounds, 2]`: by the clock and by processor time."""
    config = ds.EngineConfig(max_requests=number, max_len=PROMPT_LEN + new_tokens, method="none", prefix_sharing=False)
    engine = ds.Engine(model, config)
    prompts = bench_prompts(model, number, PROMPT_LEN)

    def seconds(max_tokens: int, deterministic: bool) -> np.ndarray:
        sampling = ds.SamplingParams(max_tokens=max_tokens, ignore_eos=True, deterministic=deterministic)
        engine.prepare(number, ds.Needs.of([sampling]))
        began = np.array([time.perf_counter(), time.process_time()])
        engine.generate(prompts, sampling)
        return np.array([time.perf_counter(), time.process_time()]) - began

    found: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for turn in range(rounds + 1):
        for deterministic in (True, False) if turn % 2 else (False, True):
            steps_s = seconds(new_tokens, deterministic) - seconds(1, deterministic)
            if turn:  # the first round warms up
                found[deterministic].append(1e3 * steps_s / (new_tokens - 1))
    return np.array(found[True]), np.array(found[False])


if __name__ == "__main__":
    raise SystemExit(main())
