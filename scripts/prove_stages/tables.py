"""Results as tables for people."""

from collections.abc import Sequence

from prove_stages import history
from prove_stages.children import figure
from prove_stages.journal import Line
from prove_stages.stages import DONE, NOT_HERE, STAGES

HEAD = ("device", "size", "implementation", "linear", "jax", "compiler", "switches")


def page(lines: Sequence[Line]) -> str:
    """The device, how each stage ended, every figure, and every error."""
    machine = history.machine(lines)
    head = "nothing has run" if not machine else ", ".join(f"{name} {machine[name]}" for name in HEAD if machine.get(name))
    void = [f"size {machine['size']}: times void"] if machine.get("size", "full") != "full" else []
    parts = [
        head,
        *void,
        markdown(["stage", "ended", "s", "code", "what it shows"], [stage_row(lines, stage.name) for stage in STAGES], "llrll"),
    ]
    rows = [row for stage in STAGES for row in entry_rows(lines, stage.name)]
    parts.append(markdown(["stage", "figure", "value", "predicted", "bar", "bound by", "note"], rows, "llrrrll"))
    failed = [
        (stage.name, line) for stage in STAGES for line in history.measurements(lines, stage.name).values() if line["error"]
    ]
    parts += [f"FAILED: {stage}, {line['name']}:\n{line['error'].strip()}" for stage, line in failed]
    return "\n\n".join(parts)


def stage_row(lines: Sequence[Line], name: str) -> list[str]:
    """Says how a stage ended, and which code its figures are of."""
    stage = next(stage for stage in STAGES if stage.name == name)
    end = history.last_end(lines, name)
    code = history.code_of(lines, name)
    if end is None:
        tried = history.measurements(lines, name)
        return [name, f"stopped after {len(tried)} measurements" if tried else "not run yet", "", code, stage.proves]
    error = f": {end['error'].strip().splitlines()[-1]}" if end["error"] else ""
    return [name, f"{end['status']}{error}", f"{end['seconds']:.0f}", code, stage.proves]


def entry_rows(lines: Sequence[Line], stage: str) -> list[list[str]]:
    """The figures of a stage."""
    return [
        [stage, entry["name"], figure(entry), figure(entry, "predicted"), bar(entry), entry["bound"], entry["note"]]
        for entry in history.entries(lines, stage).values()
    ]


def bar(entry: Line) -> str:
    """The bar of an entry, and whether it holds."""
    if entry["bar"] is None:
        return ""
    sign = "<=" if entry["at_most"] else ">="
    wanted = "yes" if entry["unit"] == "yes or no" else f"{sign} {entry['bar']:.3g}"
    return f"{wanted} {'holds' if entry['holds'] else 'MISSED'}"


def ended(end: Line | None) -> str:
    """The end of a stage in one line."""
    if end is None:
        return "did not begin"
    error = f" ({end['error'].strip().splitlines()[-1]})" if end["error"] else ""
    return f"{end['stage']}: {end['status']} in {end['seconds']:.1f} s{error}"


def all_holds(lines: Sequence[Line], stages: Sequence[str]) -> bool:
    """Whether `stages` are done, where they apply, and none of their figures misses its bar."""
    ends = [history.last_end(lines, name) for name in stages]
    found = [entry for name in stages for entry in history.entries(lines, name).values()]
    return all(end and end["status"] in (DONE, NOT_HERE) for end in ends) and all(
        entry["holds"] is not False for entry in found
    )


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> str:
    """A Markdown table in aligned columns; `sides` has an "l" or "r" for each."""
    rows = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        aligned = zip(cells, widths, sides, strict=True)
        return f"| {' | '.join(cell.rjust(width) if side == 'r' else cell.ljust(width) for cell, width, side in aligned)} |"

    rule = [f"{'-' * (width - 1)}{':' if side == 'r' else '-'}" for width, side in zip(widths, sides, strict=True)]
    return "\n".join([line(headers), line(rule), *map(line, rows)])
