"""The report: all results as JSON, a page and a figure of nine panels."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.replications.llm42.figure import draw
from scripts.replications.llm42.page import document
from scripts.replications.llm42.predicted import predictions
from scripts.replications.pool import Run, read_result

PREDICTED = {  # what is predicted needs no measurement
    "rows": (1, 4, 16, 32, 64, 128, 256, 512, 1024),
    "batch": 16,
    "windows": (4, 8, 16, 32),
    "groups": (1, 2, 4, 8, 16),
    "max_rows": 64,
}


def write_report(runs: Sequence[Run], *, workdir: Path, out: Path) -> tuple[list[Path], bool]:
    """Writes `out/data/llm42.json`, `out/llm42.md` and `out/llm42.png` from the results in `workdir`.

    Returns their paths, and whether every deterministic request gave one result in every run.
    """
    results = {run.name: read_result(workdir / run.name) for run in runs}
    found = {
        "cores": os.cpu_count(),
        "seconds": sum(one["seconds"] for one in results.values()),
        "predicted": predictions(**PREDICTED),
        "results": results,
    }
    paths = [out / "data" / "llm42.json", out / "llm42.md", out / "llm42.png"]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    paths[0].write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(document(found), encoding="utf-8")
    draw(paths[2], found)
    return paths, is_reproducible(results)


def is_reproducible(results: dict[str, dict[str, Any]]) -> bool:
    """Whether no deterministic request gave two results, or two digests."""
    bits = [one["bits"] for one in results.values() if "bits" in one]
    same = all(count["deterministic_variants"] <= 1 and count["digest_variants"] <= 1 for count in bits)
    spans = results.get("spans", {}).get("found", {}).get("deterministic", [])
    repeats = results.get("repeats", {"unique": 1, "unique_digests": 1})
    return same and all(one["bits"] is None for one in spans) and repeats["unique"] == repeats["unique_digests"] == 1
