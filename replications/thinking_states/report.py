"""The report of the replication: the results of all runs as JSON, tables and curves."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from detspec.viz.curve import draw_curves
from replications.pool import Run, read_result
from replications.thinking_states.tables import document

NAME = "results"
CURVES = {
    "parity-thinking": "flips: Thinking States",
    "parity-cot": "flips: chain of thought",
    "parity-no_cot": "flips: no chain",
    "variables-thinking": "variables: Thinking States",
    "variables-cot": "variables: chain of thought",
    "variables-no_cot": "variables: no chain",
}


def write_report(runs: Sequence[Run], *, workdir: Path, out: Path) -> list[Path]:
    """Writes `results.json`, `.md` and `.png` into `out` from the results in `workdir`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    results = {run.name: read_result(workdir / run.name) for run in runs}
    found = {"cores": os.cpu_count(), "seconds": sum(one["seconds"] for one in results.values()), "runs": results}
    paths = [out / f"{NAME}.{suffix}" for suffix in ("json", "md", "png")]
    paths[0].write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    paths[1].write_text(document(found), encoding="utf-8")
    draw_curves(
        paths[2],
        {label: curve for kind, label in CURVES.items() if (curve := mean_curve(results, kind))},
        title="Trained on up to 10 operations",
        x_label="operations",
        y_label="correct answers",
        marked_x=10,
    )
    return paths


def mean_curve(results: dict[str, dict[str, Any]], kind: str) -> list[tuple[float, float]]:
    """Accuracy by operations, the mean over the runs called `KIND-SEED`."""
    curves = [one["accuracy"] for name, one in results.items() if name.rpartition("-")[0] == kind]
    return [(int(n), mean(curve[n] for curve in curves)) for n in (curves[0] if curves else ())]
