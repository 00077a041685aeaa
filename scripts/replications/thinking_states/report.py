"""The report of the replication: the results of all runs as JSON, tables and pictures."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from scripts.replications.pool import Run, read_result
from scripts.replications.thinking_states.figure import draw
from scripts.replications.thinking_states.tables import document

NAME = "results"


def write_report(runs: Sequence[Run], *, workdir: Path, out: Path) -> list[Path]:
    """Writes `results.json`, `.md` and `.png` into `out` from the results in `workdir`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    results = {run.name: read_result(workdir / run.name) for run in runs}
    cpu_seconds = sum(one["cpu_seconds"] for one in results.values())
    found = {"cores": os.cpu_count(), "cpu_seconds": cpu_seconds, "runs": results}
    paths = [out / f"{NAME}.{suffix}" for suffix in ("json", "md", "png")]
    paths[0].write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    paths[1].write_text(document(found), encoding="utf-8")
    draw(paths[2], results)
    return paths
