"""Compares long runs on 1, 2, 4 and 8 simulated chips, token by token and bit by bit, for small models of every family.

    JAX_PLATFORMS=cpu nice python -m scripts.soak_mesh --workdir out/soak_mesh

Each model answers the same requests in each of `WAYS`. The first way is the plainest; the others must give its token ids and
bits of log-probabilities, and `CONTROLS` must not. Runs that have ended are kept in the work folder, so the same command goes
on after a kill. The exit code is 0 if everything is as expected.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import detspec as ds
from detspec.checkpoint.digest import digest_model
from detspec.config import ModelConfig
from detspec.engine.compiled import PROGRAMS
from detspec.environment import default_schedule
from detspec.mesh import make_mesh, param_specs, put
from detspec.model.dense import with_fields
from detspec.model.mlp import GatedMLP
from detspec.progress import Progress
from scripts.soak.devices import be_patient
from scripts.soak.record import commit
from tests.fakes import random_model
from tests.mesh.shapes import FAMILIES, THINKER_CFG, mlp_added_across_chips

Run = dict[str, Any]  # token ids, log-probability bits, and what happened
NUM_DEVICES = 8
PAGE = 16
MAX_LEN = 400
FEW_PAGES = 640  # for 64 requests of up to 25 pages
# Rounding to bfloat16 hides most differences, so all families run in float32. Chips have whole KV heads, or share them.
NUM_KV_HEADS = {"mistral": 1, "qwen3": 8}
MODELS: dict[str, ModelConfig] = {
    f"{name} float32": with_fields(cfg, dtype="float32", num_kv_heads=NUM_KV_HEADS.get(name, 2))
    for name, cfg in FAMILIES.items()
} | {"gemma3 bfloat16": FAMILIES["gemma3"], "thinker bfloat16": THINKER_CFG}
CONTROLLED = ("qwen2 float32", "gemma2 float32")  # models that controls run, too


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run the requests.

    Attributes:
        name: name in the table.
        chips: number of chips that the model is cut over.
        config: fields of `EngineConfig`.
        order: 1, or -1 for the last request first.
        deterministic: False for ordinary generation.
        adds: chips add parts of sums, as in usual tensor parallelism.
        against: name of the way that it is compared with.
    """

    name: str
    chips: int
    config: dict[str, Any]
    order: int = 1
    deterministic: bool = True
    adds: bool = False
    against: str = "1 chip, 12, none shared"


WAYS = (
    Way("1 chip, 12, none shared", 1, {"max_requests": 12, "method": "none", "prefix_sharing": False}),
    Way("1 chip, 64, self draft, reversed", 1, {"max_requests": 64, "method": "self", "num_speculative_tokens": 7}, order=-1),
    Way("2 chips, 64, few pages, reversed", 2, {"max_requests": 64, "method": "none", "num_pages": FEW_PAGES}, order=-1),
    Way("4 chips, 48, self draft", 4, {"max_requests": 48, "method": "self", "num_speculative_tokens": 15}),
    Way("8 chips, 64, self draft, few pages", 8, {"max_requests": 64, "method": "self", "num_pages": FEW_PAGES}, order=-1),
)
CONTROLS = (
    Way("ordinary, 1 chip, 64", 1, {"max_requests": 64, "method": "none"}, deterministic=False),
    Way("ordinary, 1 chip, 12", 1, {"max_requests": 12, "method": "none"}, deterministic=False, against="ordinary, 1 chip, 64"),
    Way("4 chips that add, 64", 4, {"max_requests": 64, "method": "none"}, adds=True),
)


def main() -> int:
    """Runs what has not run yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True, help="folder for results and compiled programs; it is kept")
    parser.add_argument("--requests", type=int, default=144, help="number of requests of each run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help="only these models")
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    os.environ["DETSPEC_COMPILE_CACHE"] = str(args.workdir.resolve() / "programs")
    be_patient()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    found = run_all(args.models, args.requests, args.workdir / f"{args.requests}_requests")
    report = judged(found, args.models)
    facts = {"requests": args.requests, "fingerprint": ds.fingerprint(), **report}
    (args.workdir / "soak_mesh.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(table(report))
    return 0 if report["sound"] else 1


def run_all(names: list[str], num_requests: int, folder: Path) -> dict[tuple[str, str], Run]:
    """Answers of each model in each way, by names of model and way: from the files of `folder`, which gets those it lacks."""
    folder.mkdir(exist_ok=True)
    runs = [(name, way) for name in names for way in (*WAYS, *CONTROLS * (name in CONTROLLED))]
    found: dict[tuple[str, str], Run] = {}
    with Progress(len(runs), "runs") as progress:
        for name, way in runs:
            path = folder / f"{name}, {way.name}.json"
            if not path.exists():
                progress.stage(f"{name}: {way.name}")
                entry = {"model": name, "way": way.name, "commit": commit(), **run(MODELS[name], way, num_requests)}
                path.with_suffix(".part").write_text(json.dumps(entry))
                path.with_suffix(".part").replace(path)
            found[name, way.name] = json.loads(path.read_text())
            progress.finished()
    return found


def run(cfg: ModelConfig, way: Way, num_requests: int) -> Run:
    """Runs the requests in one way; returns token ids and log-probability bits of each, and what happened."""
    weights = random_model(cfg)
    params = weights if way.chips == 1 else put(weights, make_mesh(cfg, way.chips), param_specs(cfg))
    model = ds.Model(cfg, params, None, (), digest_model(cfg, weights))
    schedule = default_schedule(cfg).with_numerics(page=PAGE)
    prompts, sampling = requests(cfg.vocab_size, num_requests, way.deterministic)
    with adding() if way.adds else contextlib.nullcontext():
        began = time.perf_counter()
        engine = ds.Engine(model, ds.EngineConfig(max_len=MAX_LEN, schedule=schedule, **way.config))
        engine.prepare(num_requests, ds.Needs.of(sampling), first_only=True)
        prepared = time.perf_counter()
        completions = engine.generate(prompts[:: way.order], sampling[:: way.order])[:: way.order]
    return {
        "tokens": [list(one.token_ids) for one in completions],
        "bits": [np.asarray(one.logprobs, np.float32).view(np.uint32).tolist() for one in completions],
        "mesh": engine.fingerprint()["mesh"],
        "preemptions": engine.num_preemptions,
        "drafted": engine.stats.num_draft_tokens,
        "rollbacks": engine.stats.num_rollbacks,
        "prepare_s": round(prepared - began, 1),
        "generate_s": round(time.perf_counter() - prepared, 1),
    }


def requests(vocab_size: int, number: int, deterministic: bool) -> tuple[list[list[int]], list[ds.SamplingParams]]:
    """Prompts of 1 to 90 tokens, most of which share beginnings; greedy and sampled, some with penalties and filters."""
    rng = np.random.default_rng(0)
    shared = [*rng.integers(0, vocab_size, (3, 60)).tolist(), []]
    prompts = [
        shared[i % 4][: int(rng.integers(16, 61))] + rng.integers(0, vocab_size, rng.integers(1, 31)).tolist()
        for i in range(number)
    ]
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
        {"temperature": 1.0, "logprobs_mode": "processed"},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    )
    sampling = [
        ds.SamplingParams(max_tokens=int(rng.integers(120, 301)), seed=i, deterministic=deterministic, **kinds[i % len(kinds)])
        for i in range(number)
    ]
    return prompts, sampling


@contextlib.contextmanager
def adding() -> Iterator[None]:
    """In this context chips add parts of sums; nothing that was compiled in it is used outside, nor the other way round."""
    usual = GatedMLP.rows
    GatedMLP.rows = mlp_added_across_chips  # type: ignore[method-assign]
    forget()
    try:
        yield
    finally:
        GatedMLP.rows = usual  # type: ignore[method-assign]
        forget()


def forget() -> None:
    """Drops all compiled programs."""
    PROGRAMS.forget()
    jax.clear_caches()


def judged(found: dict[tuple[str, str], Run], names: list[str]) -> dict[str, Any]:
    """For each run how many of its tokens differ from those that it is compared with; only those of controls may, and must."""
    rows = []
    for name in names:
        for way in (*WAYS[1:], *CONTROLS[1:] * (name in CONTROLLED)):
            entry, other = found[name, way.name], found[name, way.against]
            differ, compared = num_different(entry, other)
            is_control = way in CONTROLS
            as_expected = (differ > 0) == is_control
            facts = {key: value for key, value in entry.items() if key not in ("tokens", "bits")}
            rows.append({"is_control": is_control, "compared": compared, "differ": differ, "as_expected": as_expected, **facts})
    ours = [row for row in rows if not row["is_control"]]
    totals = {key: sum(row[key] for row in ours) for key in ("compared", "differ")}
    return {"sound": all(row["as_expected"] for row in rows), **totals, "runs": rows}


def num_different(one: Run, other: Run) -> tuple[int, int]:
    """How many tokens differ, in id or log-probability bits, and how many there are."""
    pairs = [
        [pair for texts in zip(each["tokens"], each["bits"], strict=True) for pair in zip(*texts, strict=True)]
        for each in (one, other)
    ]
    return sum(first != second for first, second in zip(*pairs, strict=True)), len(pairs[0])


def table(report: dict[str, Any]) -> str:
    """A row for each way, over all models."""
    lines = ["| run | models | tokens compared | differ | preemptions | drafted | rollbacks |", "|---|---|---|---|---|---|---|"]
    for way in dict.fromkeys(row["way"] for row in report["runs"]):
        rows = [row for row in report["runs"] if row["way"] == way]
        sums = [sum(row[key] for row in rows) for key in ("compared", "differ", "preemptions", "drafted", "rollbacks")]
        lines.append(f"| {way} | {len(rows)} | " + " | ".join(f"{number:,}" for number in sums) + " |")
    verdict = "as expected" if report["sound"] else "NOT AS EXPECTED"
    return "\n".join([*lines, f"{report['compared']:,} tokens compared, {report['differ']:,} differ: {verdict}"])


if __name__ == "__main__":
    sys.exit(main())
