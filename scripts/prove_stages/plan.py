"""Says how long each stage should take on a device that is not here, from programs that were compiled for it."""

import json
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from prove_stages.stages import NOT_HERE, STAGES, Stage
from prove_stages.tables import markdown

FILE = Path(__file__).parents[2] / "docs" / "data" / "prove_plan.json"
OF_PEAK = 0.5  # assumed share of a device's peaks that programs reach
LOAD_S = 4.6  # a program of eight layers that is compiled already, traced again and loaded: measured on an H200
REPEATS = 9  # samples of each program that is timed, the warm-up among them

INTRODUCTION = """The plan for {name}. "trace" and "compile" are the times that tracing and compiling all programs took ahead
of time, one after the other, on {cores} slower and busier cores without the device; what an earlier stage has left in the cache
is loaded instead, {load} s a program. A GPU also tries out products ("autotuning"), which is not in it. "at once" is how many
of these seconds a second of 16 cores does. "run" is the roofline time of all calls at {share:.0%} of the peaks. "more" is
estimated from what stages took on an H200: starting, weights, loading, copies to the host, autotuning, float64 on the host, and
whole generations. "share" is what a stage may take of the sum; it may take more if others have taken less."""


def targets() -> list[str]:
    """Devices that there is a plan for."""
    return list(read()["targets"]) if FILE.exists() else []


def read() -> dict[str, Any]:
    """Reads what `tests/aot/compile_proof.py` wrote."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def table(name: str, stages: Sequence[Stage] = STAGES) -> str:
    """Seconds of each of `stages`, one after the other, and their sums."""
    content = read()
    found = content["targets"][name]
    programs = content["programs"][found["platform"]]
    rows = []
    sums = [0.0] * 6
    cached: set[str] = set()
    for stage in stages:
        if stage.name not in found["stages"]:
            why = "not compiled yet" if found["platform"] in stage.platforms else NOT_HERE
            rows.append([stage.name, why, *[""] * 8])
            continue
        needed_rows = different(found["stages"][stage.name])
        figures = seconds(stage, needed_rows, programs, frozenset() if stage.own_cache else cached)
        cached |= set() if stage.own_cache else {row["text"] for row in needed_rows}
        sums = [total + figure for total, figure in zip(sums, figures, strict=True)]
        needed = [programs[row["text"]] for row in needed_rows]
        largest = max((program["peak_bytes"] for program in needed), default=0) / 1e9
        rows.append(
            [stage.name, str(len(needed)), str(stage.at_once), *(f"{figure:.0f}" for figure in figures), f"{largest:.1f}"]
        )
    rows.append(["all", "", "", *(f"{total:.0f}" for total in sums), ""])
    headers = ["stage", "programs", "at once", "trace s", "compile s", "run s", "more s", "all s", "share s", "largest GB"]
    introduction = INTRODUCTION.format(name=name, cores=content["cores"], share=OF_PEAK, load=LOAD_S)
    return f"{introduction}\n\n{markdown(headers, rows, 'lrrrrrrrrr')}"


def different(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each program once: a process compiles equal programs once."""
    return list({row["text"]: row for row in reversed(rows)}.values())[::-1]


def seconds(stage: Stage, rows: list[dict[str, Any]], programs: dict[str, Any], cached: Set[str]) -> list[float]:
    """Seconds of tracing and compiling what is not `cached`, running and more, all together, and the share of the stage.

    "More" has the loading of programs that are cached. Each process of a stage takes all but the share.
    """
    new = [row for row in rows if row["text"] not in cached]
    trace_s = sum(programs[row["text"]]["trace_s"] for row in new)
    compile_s = sum(programs[row["text"]]["compile_s"] for row in new)
    run_s = sum(REPEATS * row["calls"] * row["least_s"] for row in rows) / OF_PEAK
    more_s = stage.run_s + LOAD_S * (len(rows) - len(new))
    elapsed_s = (trace_s + compile_s) / stage.at_once + run_s + more_s
    return [*(stage.processes * one for one in (trace_s, compile_s, run_s, more_s, elapsed_s)), float(stage.share_s)]
