"""What earlier lines of a results file mean for a run: what is done, and what each stage found."""

from collections.abc import Iterable, Sequence

from prove_stages.journal import Line
from prove_stages.stages import DONE, NOT_HERE, STAGES


def measurements(lines: Iterable[Line], stage: str) -> dict[str, Line]:
    """The last line of each measurement of `stage`, by name; a success stays."""
    found: dict[str, Line] = {}
    for line in lines:
        if line["kind"] == "measurement" and line["stage"] == stage:
            name = line["name"]
            if not (name in found and not found[name]["error"]):
                found[name] = line
    return found


def of_run(lines: Iterable[Line], run: str) -> list[Line]:
    """The lines that this `run` has added."""
    return [line for line in lines if line.get("run") == run]


def known(lines: Sequence[Line], stage: str, run: str) -> set[str]:
    """Measurements of `stage` that need not be tried in this `run`: those that succeeded, and those that failed in it."""
    return {name for name, line in measurements(lines, stage).items() if not line["error"] or line["run"] == run}


def last_end(lines: Iterable[Line], stage: str) -> Line | None:
    """How `stage` ended last; None if it never did."""
    return next((line for line in reversed([*lines]) if line["kind"] == "end" and line["stage"] == stage), None)


def unfinished(lines: Sequence[Line]) -> list[str]:
    """Stages that are not done, in their order."""
    ends = {stage.name: last_end(lines, stage.name) for stage in STAGES}
    return [name for name, end in ends.items() if end is None or end["status"] not in (DONE, NOT_HERE)]


def entries(lines: Sequence[Line], stage: str) -> dict[str, Line]:
    """The entries of `stage` by name: of measurements that succeeded, and the last ones of those that got no further."""
    ended = measurements(lines, stage)
    parts = {line["name"]: line for line in lines if line["kind"] == "partial" and line["stage"] == stage}
    names = dict.fromkeys((*ended, *parts))
    found = [ended[name] if name in ended and not ended[name]["error"] else parts.get(name) for name in names]
    return {entry["name"]: entry for line in found if line is not None for entry in line["entries"]}


def machine(lines: Iterable[Line]) -> Line:
    """The last worker's words on its device; empty without any."""
    return next((line for line in reversed([*lines]) if line["kind"] == "run"), {})
