"""The table of docs/measured_devices.md: headlines by device, from the results that docs/data/devices.json keeps."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prove_stages import history
from prove_stages.children import figure
from prove_stages.journal import Line
from prove_stages.stages import DONE, NOT_HERE, STAGES
from prove_stages.tables import markdown

BEGIN = "<!-- written by scripts/prove_on_device.py --write-docs: begin -->"
END = "<!-- end -->"
DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "TPU v6 lite")  # columns, also before they have run
NOT_RUN = "not run yet"
ALL = "all with a bar"  # instead of one figure, how many of a stage hold
HEADLINES = (
    ("ceilings", "copy", "device copy, read and written"),
    ("ceilings", "product", "bfloat16 product"),
    ("kernels", ALL, "kernels against float64, unused memory nan"),
    ("attention", "decode 32 x 4096, of a copy", "decode attention 32 x 4096, of a copy's speed"),
    ("attention", "decode 128 x 1024, of a copy", "decode attention 128 x 1024"),
    ("attention", "decode 1 x 32768, of a copy", "decode attention 1 x 32768"),
    ("vendor", "prefill 1x2048, of the vendor's speed", "prefill of 2048, of the vendor's speed"),
    (
        "products",
        "layer, pinned, 32 rows, of the library's speed",
        "pinned products of a layer, 32 rows, of the library's speed",
    ),
    ("products", "layer, pinned, 256 rows, of the library's speed", "pinned products of a layer, 256 rows"),
    ("products", "layer, int8, 256 rows, of bfloat16's speed", "int8 products of a layer, 256 rows, of bfloat16's speed"),
    (
        "experts",
        "layer of Qwen3 30B-A3B, 32 rows, over reading its weights",
        "experts of Qwen3 30B-A3B, 32 rows, over reading them",
    ),
    (
        "experts",
        "layer of gpt-oss 20B, 32 rows, over reading its weights",
        "experts of gpt-oss 20B, 32 rows, over reading them",
    ),
    ("integers", "hashes of the definition", "integer models: hashes of the definition"),
    ("integers", "step of 32 rows, 8 layers, in integers, over bfloat16", "step of 32 rows in integers, over bfloat16"),
    ("integers", "pass of 256 rows, 8 layers, in integers, over bfloat16", "pass of 256 rows in integers, over bfloat16"),
    ("passes", "step of 32 rows, 8 layers", "step of 32 rows, 8 layers of 8B"),
    (
        "passes",
        "canonical step of 32 rows, 8 layers over step of 32 rows, 8 layers",
        "canonical step of 32 rows over this step",
    ),
    ("passes", "pass of 256 rows, 8 layers over step of 32 rows, 8 layers", "canonical pass of 256 rows over this step"),
    ("whole", "step of 32 rows, 32 layers", "step of 32 rows, 32 layers of 8B"),
    ("completions", "completions, deterministic: different results", "different results of 1,000 completions of one prompt"),
    ("completions", "completions, ordinary: different results", "the same, ordinary"),
    ("generation", "1 requests, all deterministic, of ordinary", "1 deterministic request, of ordinary speed"),
    ("generation", "8 requests, all deterministic, of ordinary", "8 deterministic requests"),
    ("generation", "32 requests, all deterministic, of ordinary", "32 deterministic requests"),
    ("generation", "128 requests, all deterministic, of ordinary", "128 deterministic requests"),
    ("generation", "9 requests, 1 deterministic, of ordinary", "1 deterministic request among 9"),
    ("doctor", "rows with equal bits", "numbers of rows with the anchor's bits"),
    ("doctor", "splits with equal bits", "splits of the anchor's rows with equal bits"),
    ("doctor", ALL, "what must not matter does not, the control differs"),
    ("doctor again", ALL, "two processes have the same bits"),
)


def write(lines: Sequence[Line], folder: Path) -> None:
    """Adds the results in `lines` to `data/devices.json`, and rewrites the table of `measured_devices.md`.

    Raises `ValueError` for a rehearsal, whose figures mean nothing, and where nothing has run.
    """
    machine = history.machine(lines)
    if machine.get("size") != "full":
        raise ValueError(f"only full runs are published, this one is {machine.get('size', 'empty')!r}")
    file = folder / "data" / "devices.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    results[", ".join(filter(None, (machine["device"], machine.get("switches"))))] = result(lines)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    page = folder / "measured_devices.md"
    page.write_text(with_table(page.read_text(encoding="utf-8"), table(results)), encoding="utf-8")


def result(lines: Sequence[Line]) -> dict[str, Any]:
    """Sums up one device: the machine, how stages ended, which code measured them, and their figures."""
    ends = {stage.name: history.last_end(lines, stage.name) for stage in STAGES}
    return {
        "machine": history.machine(lines),
        "stages": {name: end["status"] for name, end in ends.items() if end},
        "code": {stage.name: code for stage in STAGES if (code := history.code_of(lines, stage.name))},
        "entries": {stage.name: history.entries(lines, stage.name) for stage in STAGES},
    }


def with_table(text: str, table: str) -> str:
    """`text` with `table` between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def table(results: Mapping[str, Any]) -> str:
    """Headlines in rows, devices in columns."""
    devices = [*results, *(device for device in DEVICES if device not in results)]
    rows = [[label, *(cell(results.get(device), stage, name) for device in devices)] for stage, name, label in HEADLINES]
    return markdown(["", *devices], rows, "l" + "r" * len(devices))


def cell(found: Mapping[str, Any] | None, stage: str, name: str) -> str:
    """Writes one figure of one device, or why there is none."""
    status = None if found is None else found["stages"].get(stage)
    if found is None or (status is None and not found["entries"].get(stage)):
        return NOT_RUN
    if status == NOT_HERE:
        return NOT_HERE
    entries = found["entries"][stage]
    if name == ALL:
        held = [entry["holds"] for entry in entries.values() if entry["holds"] is not None]
        return f"{sum(held)} of {len(held)}" + ("" if status == DONE else f", {status}")
    if name not in entries:
        return status if status != DONE else NOT_RUN
    entry = entries[name]
    if entry["unit"] == "of all":
        share = "all" if entry["value"] == 1 else f"{entry['value']:.0%}"
        return f"{share}: {entry['note']}"
    if "so far" in entry["note"]:  # a stage that was cut off while it counted
        return f"{figure(entry)} {entry['note'].partition(';')[0]}"
    return f"{figure(entry)} (bar missed)" if entry["holds"] is False else figure(entry)
