"""Reads earlier lines of a results file: what is done, by which code, and what each stage found.

Results of different code are not mixed in a stage: those of the code that measured it last are shown, and a stage that runs
again takes no result of other code for its own.
"""

from collections.abc import Iterable, Sequence

from prove_stages.journal import Line
from prove_stages.stages import DONE, NOT_HERE, STAGES


def measurements(lines: Iterable[Line], stage: str) -> dict[str, Line]:
    """The last line of each measurement of `stage`, by name; a failure does not replace a success."""
    found: dict[str, Line] = {}
    for line in of_last_code(lines, stage):
        if line["kind"] == "measurement" and not (line["error"] and line["name"] in found and not found[line["name"]]["error"]):
            found[line["name"]] = line
    return found


def codes(lines: Iterable[Line]) -> dict[str, str]:
    """The code of each run, as a digest; "" where lines do not say it."""
    return {line["run"]: line.get("code", "") for line in lines if line["kind"] == "run" and "run" in line}


def of_code(lines: Iterable[Line], run: str) -> list[Line]:
    """The lines of runs of the same code as `run`."""
    lines = [*lines]
    code = codes(lines)
    return [line for line in lines if code.get(line.get("run", ""), "") == code.get(run, "")]


def of_last_code(lines: Iterable[Line], stage: str) -> list[Line]:
    """The figures of `stage` that are of the code that measured it last."""
    lines = [*lines]
    own = [line for line in lines if line["kind"] in ("partial", "measurement") and line["stage"] == stage]
    code = codes(lines)
    return [line for line in own if code.get(line["run"], "") == code.get(own[-1]["run"], "")]


def of_run(lines: Iterable[Line], run: str) -> list[Line]:
    """The lines that this `run` has added."""
    return [line for line in lines if line.get("run") == run]


def code_of(lines: Sequence[Line], stage: str) -> str:
    """The code that the figures of `stage` are of; "" if it has none."""
    return next((codes(lines).get(line["run"], "") for line in of_last_code(lines, stage)), "")


def known(lines: Sequence[Line], stage: str, run: str) -> set[str]:
    """Measurements of `stage` that need not be tried in this `run`: those that succeeded, and those that failed in it."""
    return {name for name, line in measurements(lines, stage).items() if not line["error"] or line["run"] == run}


def last_end(lines: Iterable[Line], stage: str) -> Line | None:
    """Finds how `stage` ended last; None if it never did."""
    return next((line for line in reversed([*lines]) if line["kind"] == "end" and line["stage"] == stage), None)


def unfinished(lines: Sequence[Line]) -> list[str]:
    """Stages that are not done, in their order."""
    ends = {stage.name: last_end(lines, stage.name) for stage in STAGES}
    return [name for name, end in ends.items() if end is None or end["status"] not in (DONE, NOT_HERE)]


def entries(lines: Sequence[Line], stage: str) -> dict[str, Line]:
    """The entries of `stage` by name: of measurements that succeeded, and the last ones of those that got no further."""
    ended = measurements(lines, stage)
    parts = {line["name"]: line for line in of_last_code(lines, stage) if line["kind"] == "partial"}
    names = dict.fromkeys((*ended, *parts))
    found = [ended[name] if name in ended and not ended[name]["error"] else parts.get(name) for name in names]
    return {entry["name"]: entry for line in found if line is not None for entry in line["entries"]}


def machine(lines: Iterable[Line]) -> Line:
    """The last worker's words on its device; empty without any."""
    return next((line for line in reversed([*lines]) if line["kind"] == "run"), {})
