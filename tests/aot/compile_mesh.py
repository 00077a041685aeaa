"""Compiles programs of models on several chips that are not here; writes docs/data/mesh.json, and prints a table.

    .venv/aot/bin/python tests/aot/compile_mesh.py                  # all, about half an hour on two cores
    .venv/aot/bin/python tests/aot/compile_mesh.py --targets h200   # a part; other rows of the file stay
    .venv/aot/bin/python tests/aot/compile_mesh.py --table          # compiles nothing, and prints both tables of the docs

The file is rewritten after each program. Models have full width and vocabulary, and two layers.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax must not look for the devices compiled for

from mesh_shapes import ROOM, SLICES, SWEEP, MeshProgram
from tqdm import tqdm

from detspec.model.params import pass_work
from detspec.planning.mesh_plan import pass_seconds
from detspec.presets import preset
from detspec.target_compilers import compilers
from detspec.targets import canonical_schedule, target

FILE = Path(__file__).parents[2] / "docs" / "data" / "mesh.json"


def main() -> None:
    """Compiles what is asked for and not yet in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    targets = sorted({program.target for program in SWEEP})
    programs = sorted({program.program for program in SWEEP})
    parser.add_argument("--targets", nargs="+", default=targets, choices=targets, metavar="NAME", help="what to compile for")
    parser.add_argument("--programs", nargs="+", default=programs, choices=programs, metavar="NAME", help="what to compile")
    parser.add_argument("--again", action="store_true", help="compile what is in the file, too")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    args = parser.parse_args()
    rows = {row["name"]: row for row in json.loads(FILE.read_text(encoding="utf-8"))["programs"]} if FILE.exists() else {}
    asked = [program for program in SWEEP if program.target in args.targets and program.program in args.programs]
    for program in tqdm([] if args.table else asked, unit="program", disable=None):
        if args.again or program.name not in rows:
            rows[program.name] = row(program)
            content = {"versions": compilers(), "programs": [rows[each.name] for each in SWEEP if each.name in rows]}
            FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = table([rows[each.name] for each in SWEEP if each.name in rows])
    print("\n".join([*lines, "", *next_to_sums()] if args.table else lines))


def row(program: MeshProgram) -> dict[str, Any]:
    """Facts of a program, or the compiler's message if it refuses."""
    try:
        return {"name": program.name, **program.report(program.cfg())}
    except Exception as error:  # compilers refuse in many ways; the table says so
        return {"name": program.name, **program._asdict(), "error": str(error).splitlines()[0]}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The file as Markdown."""
    head = "kernels over own heads | received by a chip | as by formula | floats added | weights gathered | pools moved"
    lines = [
        f"| model | chips | program | products | {head} | temporaries | compiled in |",
        "|---|---|---|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for found in rows:
        start = f"| {found['preset']} | {found['chips']} of {found['target']} | {found['program']} | {found['linear']} |"
        if "error" in found:
            lines.append(f"{start} refused: {found['error'][:100]} | | | | | | | |")
            continue
        lines.append(
            f"{start} {found['attention_kernels']} | {found['received_bytes'] / 1e6:,.1f} MB | "
            f"{'yes' if found['equals_formula'] else 'no'} | {found['added_floats']} | {found['gathered_weights']} | "
            f"{found['moved_pools']} | {found['temp_bytes'] / 1e6:,.0f} MB | {found['seconds']:.0f} s |"
        )
    return lines


def next_to_sums() -> list[str]:
    """Predicted canonical passes of 16 x 16 and of 32 x 1 rows, next to the layout that adds partial sums, as Markdown."""
    lines = [
        "| model | chips | rows | a chip's work | our collectives | those of psum | over psum, all at once | in turn |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, device, chips in SLICES:
        cfg = preset(name)
        for rows, window in ((256, 16), (32, 1)):
            schedule = canonical_schedule(target(device), cfg).with_budget(rows, window)
            work = pass_work(cfg, schedule, windows=rows // window, context=ROOM["max_len"], chips=chips)
            own_s = work.seconds(target(device))
            ours, sums = (pass_seconds(own_s, cfg, target(device), chips, rows, layout) for layout in ("gather", "psum"))
            lines.append(
                f"| {name} | {chips} of {device} | {rows} | {1e3 * own_s:.2f} ms | {1e3 * (ours[1] - own_s):.2f} ms | "
                f"{1e3 * (sums[1] - own_s):.2f} ms | {ours[0] / sums[0]:.2f} | {ours[1] / sums[1]:.2f} |"
            )
    return lines


if __name__ == "__main__":
    main()
