"""Findings of all trials of a work folder, as counts and as tables."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.soak.record import Entry, Journal, num_kills, num_tokens

BEGIN = "<!-- written by scripts/soak --write-docs: begin -->"
END = "<!-- end -->"
TOKENS, KILLS = 1_000_000, 1000  # what the long one is to reach
# Axes as the table names them, and the keys of trials that hold what was drawn.
AXES = {
    "model": "model",
    "batch size": "max_requests",
    "composition": "composition",
    "order": "order",
    "arrival": "arrival",
    "neighbours": "neighbours",
    "chunks of prompts: window": "window",
    "passes over prompts between steps": "prefill_passes",
    "prefix cache": "prefixes",
    "few pages": "few_pages",
    "draft source": "method",
    "most drafted tokens": "most_drafted",
    "tokens between looks of the host": "segment_steps",
    "simulated chips": "chips",
    "asked": "asked",
    "checked": "checked",
    "clocks": "clocks",
    "weights": "weights",
    "programs": "programs",
}
# What trials call controls by the check that they belong to, and what the control is.
CONTROLS = {
    "scored": "ordinary answers, scored",
    "read as prompts": "ordinary answers, read as prompts",
    "audited": "altered answer in a replay",
    "other weights": "answers with other weights",
    "unaltered output is sound": "unaltered output in an audit: must be sound",
}
COUNTED = ("preemptions", "rollbacks", "ties", "checked_tokens")
HAPPENED = ("starts", "full_disks", "wrong_clocks", "started_anew", "compiled_anew", "lost", "debris")


def report(folder: Path) -> Entry:
    """Counts over both journals of a work folder; `sound` if every trial was as expected."""
    engines = Journal(folder / "engines.jsonl")
    jobs = Journal(folder / "jobs.jsonl")
    trials = [*engines.trials, *jobs.trials]
    starts = sorted([*engines.starts, *jobs.starts], key=lambda entry: str(entry["date"]))
    dates = sorted(entry["date"] for entry in [*starts, *trials] if "date" in entry)
    return {
        "sound": bool(trials) and all(entry["as_expected"] for entry in trials),
        "fingerprint": starts[-1]["fingerprint"] if starts else {},
        "seed": starts[-1]["seed"] if starts else None,
        "commits": list(dict.fromkeys(entry["commit"] for entry in starts)),
        "packages": list(dict.fromkeys(entry.get("package", "?") for entry in starts)),
        "dates": dates[:1] + dates[-1:],
        "hours": round(sum(entry["seconds"] for entry in trials) / 3600, 1),
        "tokens": {"engines": num_tokens(engines.trials), "jobs": num_tokens(jobs.trials)},
        "differ": sum(entry.get("differ", 0) for entry in trials),
        "engines": {
            "trials": len(engines.trials),
            **{name: sum(entry.get(name, 0) for entry in engines.trials) for name in COUNTED},
        },
        "jobs": {
            "trials": len(jobs.trials),
            "lines": sum(entry.get("lines", 0) for entry in jobs.trials),
            "killed": num_kills(jobs.trials),
            "kills": added(entry["kills"] for entry in jobs.trials),
            **{name: sum(entry.get(name, 0) for entry in jobs.trials) for name in HAPPENED},
            "options": added(entry["options"] for entry in jobs.trials),
        },
        "controls": controls_of(trials),
        "axes": {name: axis(engines.trials, key) for name, key in AXES.items()},
        "unexpected": [entry for entry in trials if not entry["as_expected"]],
    }


def added(counts: Any) -> dict[str, int]:
    """Counts by name, added up."""
    total: dict[str, int] = defaultdict(int)
    for each in counts:
        for name, number in each.items():
            total[name] += number
    return dict(sorted(total.items()))


def controls_of(trials: Sequence[Entry]) -> dict[str, list[int]]:
    """How often each control found what it must find, and how often it ran."""
    total: dict[str, list[int]] = {}
    for entry in trials:
        for key, (found, tried) in entry["controls"].items():
            name = CONTROLS.get(key, key)
            before = total.get(name, [0, 0])
            total[name] = [before[0] + found, before[1] + tried]
    return dict(sorted(total.items()))


def axis(trials: Sequence[Entry], key: str) -> dict[str, list[int]]:
    """For each value of an axis the number of trials with it, and the tokens that were compared in them."""
    total: dict[str, list[int]] = {}
    for entry in trials:
        if key in entry:
            before = total.get(shown(entry[key]), [0, 0])
            total[shown(entry[key])] = [before[0] + 1, before[1] + entry["tokens"]]
    return dict(sorted(total.items(), key=lambda item: (len(item[0]), item[0]) if item[0].isdecimal() else (0, item[0])))


def counted(value: str | int) -> str:
    """A cell of the table."""
    return value if isinstance(value, str) else f"{value:,}"


def shown(value: Any) -> str:
    """A drawn value, as the table names it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "the engine's choice" if value is None else str(value)


def tables(found: Entry) -> str:
    """The report in Markdown: what was found, each axis, each control."""
    jobs = found["jobs"]
    engines = found["engines"]
    machine = found["fingerprint"]
    facts = {
        "from, to (UTC)": " to ".join(found["dates"]),
        "commits": ", ".join(found["commits"]),
        "contents of the package (`git rev-parse HEAD:detspec`)": ", ".join(found["packages"]),
        "machine": f"{machine['device_kind']}, jax {machine['jax']}, jaxlib {machine['jaxlib']}",
        "trials": engines["trials"] + jobs["trials"],
        "committed tokens compared, in engines": found["tokens"]["engines"],
        "committed tokens compared, in killed jobs": found["tokens"]["jobs"],
        "tokens scored, read as prompts or audited besides": engines["checked_tokens"],
        "of all these, with another id or other bits": found["differ"],
        "tokens that were the first of two equally likely ones": engines["ties"],
        "rollbacks": engines["rollbacks"],
        "preemptions": engines["preemptions"],
        "starts of `detspec generate`": jobs["starts"],
        "started by a Python of their own": jobs["started_anew"],
        "killed": jobs["killed"],
        **{f"killed: {name}": number for name, number in jobs["kills"].items()},
        "ended by a full disk": jobs["full_disks"],
        "with clocks that jump": jobs["wrong_clocks"],
        "with an empty cache of compiled programs": jobs["compiled_anew"],
        "lines of output compared": jobs["lines"],
        "finished lines that were lost": jobs["lost"],
        "temporary files that were left over": jobs["debris"],
    }
    missing = []
    if found["tokens"]["engines"] < TOKENS:
        missing.append(f"{found['tokens']['engines']:,} of {TOKENS:,} tokens in engines")
    if jobs["killed"] < KILLS:
        missing.append(f"{jobs['killed']:,} of {KILLS:,} kills")
    lines = [f"This run is not at its end: {', '.join(missing)}.", ""] if missing else []
    lines += ["| | |", "|---|---|", *(f"| {name} | {counted(value)} |" for name, value in facts.items())]
    lines += ["", "| axis | values: tokens compared |", "|---|---|"]
    for name, values in found["axes"].items():
        lines.append(f"| {name} | {', '.join(f'{value}: {tokens:,}' for value, (_, tokens) in values.items())} |")
    lines += ["", "| control | ran | found what it must find |", "|---|---|---|"]
    lines += [f"| {name} | {tried} | {hits} |" for name, (hits, tried) in found["controls"].items()]
    return "\n".join(lines)


def write(found: Entry, docs: Path) -> None:
    """Writes the report to `data/soak.json`, and its tables into the page `soak.md`."""
    (docs / "data" / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    page = docs / "soak.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{tables(found)}\n{END}{rest.split(END)[1]}")
