#!/usr/bin/env python
"""Compares detspec with other generators on this CPU: same weights, prompts and number of threads, one after the other.

Every system runs in a process of its own, in an environment of its own. An environment that is missing is installed below
--folder, which needs a package index, a C++ compiler for llama.cpp and vLLM, and some GB. A system that cannot be installed or
fails is named below the table, and the others go on.

All get token ids, generate greedily and ignore end tokens. In each round the systems take turns at each batch size, every other
round in reverse order; the processes of those that wait are stopped. A first round, which compiles, does not count. "prefill"
is the time of requests of one new token, and a step is the rest of the time over the other tokens. At last each system
generates from the same prompts one by one and all at once: texts that change depend on the batch.

    python scripts/race.py --folder out/race --preset random_100m --json out/race.json
    python scripts/race.py --folder out/race --systems detspec llama.cpp --env llama.cpp=other/bin/python
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from race_systems import Limits, Prompts
from race_systems.preparing import FailedError, python_of, write_form
from race_systems.process import Process
from race_systems.results import Sample, agreement, num_changed, reference_of, table
from race_systems.systems import DETERMINISTIC, ENVIRONMENTS, FAMILIES, SYSTEMS, System
from tqdm import tqdm

from detspec import InputError, Model, fingerprint, load
from detspec.bench.bench import bench_prompts, random_model
from detspec.checkpoint.hf import save_hf
from detspec.model.dense import config_to_json
from detspec.model.params import num_params, params_bytes
from detspec.presets import preset


def main(argv: Sequence[str] | None = None) -> int:
    """Races, prints the tables, writes the JSON."""
    args = parse(argv)
    model = random_model(preset(args.preset)) if args.preset else load(args.model)
    if args.prompt_len + args.new_tokens > model.cfg.max_position:
        raise InputError(
            f"--prompt-len and --new-tokens together must be at most {model.cfg.max_position}, the model's max_position, "
            f"got {args.prompt_len + args.new_tokens}"
        )
    folder = args.folder.resolve() / model.digest[:12]
    if not (folder / "hf").exists():
        save_hf(folder / "hf", model.cfg, model.params, eos_ids=())
    limits = Limits(max(*args.batches, args.texts), args.prompt_len + args.new_tokens, os.cpu_count() or 1)
    result = {
        "machine": describe_machine(),
        "fingerprint": fingerprint(),
        "model": {
            **config_to_json(model.cfg),
            "num_params": num_params(model.cfg),
            "params_bytes": params_bytes(model.params),
            "cache_bytes": cache_bytes(model, limits),
        },
        "settings": {
            "batches": args.batches,
            "prompt_len": args.prompt_len,
            "new_tokens": args.new_tokens,
            "rounds": args.rounds,
            "texts": args.texts,
            "threads": limits.num_threads,
        },
        **race([system for system in SYSTEMS if system.environment in args.systems], model, folder, limits, args),
    }
    print(table(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="keeps environments, models and logs")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="DIR", help="a Hugging Face folder (default: the shipped model)")
    which.add_argument("--preset", metavar="NAME", help="random weights of this shape")
    parser.add_argument(
        "--systems", nargs="+", default=list(FAMILIES), choices=FAMILIES, metavar="NAME", help=", ".join(FAMILIES)
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"use the environment of this interpreter; NAME is one of {', '.join(ENVIRONMENTS)}; may be given several times",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="batch sizes")
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="new tokens of each request, at least 2")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="number of rounds; the median counts")
    parser.add_argument("--texts", type=int, default=32, metavar="N", help="prompts that are generated from alone and together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to this file")
    args = parser.parse_args(argv)
    for name, least in (("prompt_len", 1), ("new_tokens", 2), ("rounds", 1), ("texts", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if min(args.batches) < 1:
        parser.error(f"--batches must be at least 1, got {min(args.batches)}")
    args.batches = sorted(set(args.batches))
    if "detspec" not in args.systems:
        parser.error("--systems must include detspec, which the others are compared with")
    pairs = [pair.partition("=") for pair in args.env]
    for name, _, python in pairs:
        if name not in ENVIRONMENTS or not os.access(python, os.X_OK):
            parser.error(
                f"--env must be NAME=PYTHON, NAME one of {', '.join(ENVIRONMENTS)} and PYTHON a program; got {name}={python}"
            )
    args.env = {name: Path(python).absolute() for name, _, python in pairs}
    return args


def race(systems: Sequence[System], model: Model, folder: Path, limits: Limits, args: argparse.Namespace) -> dict[str, Any]:
    """Samples, texts and memory of all systems that run, and why the others do not."""
    prompts = bench_prompts(model, limits.max_requests, args.prompt_len)
    running: dict[str, Process] = {}
    absent: dict[str, str] = {}
    samples: list[Sample] = []
    texts: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def attempt(name: str, doing: str) -> Iterator[None]:
        """Shows the progress; a system that fails leaves the race."""
        progress.set_description(f"{name}: {doing}")
        try:
            yield
        except FailedError as error:
            absent[name] = str(error)
            if name in running:
                running.pop(name).close()
        progress.update()

    with tqdm(total=len(systems) * (2 + len(args.batches) * (args.rounds + 1)), unit="turn", disable=None) as progress:
        try:
            for system in systems:
                with attempt(system.name, "installing and loading"):
                    python = ready(system, folder, args)
                    running[system.name] = Process(system, python, folder, limits)
                    with running[system.name].turn():
                        running[system.name].wait_until_loaded()
            for number in range(args.rounds + 1):
                for batch in args.batches:
                    for name in list(running) if number % 2 else list(running)[::-1]:
                        with attempt(name, f"round {number}, batch {batch}"), running[name].turn():
                            samples.append(measure(running[name], prompts[:batch], args.new_tokens, number))
            for name in list(running):
                with attempt(name, "texts"), running[name].turn():
                    texts[name] = generate_texts(running[name], prompts[: args.texts], args.new_tokens)
            if DETERMINISTIC in absent:
                raise InputError(f"{DETERMINISTIC} failed: {absent[DETERMINISTIC]}")
            return {
                "samples": [dataclasses.asdict(s) for s in samples if s.system in running and s.round > 0],
                "systems": describe_systems(running, texts),
                "reference": reference_of(running),
                "absent": absent,
            }
        finally:
            for process in running.values():
                process.close()


def ready(system: System, folder: Path, args: argparse.Namespace) -> Path:
    """The interpreter of the environment of `system`; writes the model in its form, too."""
    if system.form:
        write_form(system.form, folder, python_of(system.form.environment, args.env, folder.parent))
    return python_of(system.environment, args.env, folder.parent)


def measure(process: Process, prompts: Prompts, new_tokens: int, number: int) -> Sample:
    """Times the first tokens, then whole requests."""
    first_s = process.generate(prompts, 1)["seconds"]
    return Sample(len(prompts), process.system.name, number, process.generate(prompts, new_tokens)["seconds"], first_s)


def generate_texts(process: Process, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
    """The texts of all prompts at once, and how many of them are different alone."""
    together = process.generate(prompts, new_tokens)["tokens"]
    alone = [process.generate([prompt], new_tokens)["tokens"][0] for prompt in prompts]
    return {"tokens": together, "num_changed": num_changed(alone, together)}


def describe_systems(running: Mapping[str, Process], texts: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Facts of each system besides its samples."""
    reference = texts[reference_of(running)]["tokens"]
    return {
        name: {
            **process.loaded,
            "peak_bytes": process.peak_bytes(),
            "agreement": agreement(reference, texts[name]["tokens"]),
            "num_changed": texts[name]["num_changed"],
        }
        for name, process in running.items()
    }


def cache_bytes(model: Model, limits: Limits) -> int:
    """The bytes of keys and values of all requests at full length, in the dtype of the model."""
    cfg = model.cfg
    mixer = cfg.layer(0).mixer
    per_position = 2 * cfg.num_layers * mixer.num_kv_heads * mixer.head_dim * jnp.dtype(cfg.dtype).itemsize
    return limits.max_requests * limits.max_len * per_position


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and load."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": next(iter(names), platform.processor()),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped workers do not outlive the race
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"race: error: {error}")
