"""Compiles programs of models on several chips that are not here; writes docs/data/mesh.json, and prints a table.

    .venv/aot/bin/python aot/compile_mesh.py                              # all, about half an hour on two cores
    .venv/aot/bin/python aot/compile_mesh.py --targets h200               # a part; other rows of the file stay
    .venv/aot/bin/python aot/compile_mesh.py --table                      # only prints the table of what is in the file

The file is rewritten after each program. Models have full width and vocabulary, and two layers.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax must not look for the devices compiled for

from mesh_shapes import SWEEP, MeshProgram
from tqdm import tqdm

from detspec.target_compilers import compilers

FILE = Path(__file__).parents[1] / "docs" / "data" / "mesh.json"


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
    print("\n".join(table([rows[each.name] for each in SWEEP if each.name in rows])))


def row(program: MeshProgram) -> dict[str, Any]:
    """What is true of one program; what the compiler says if it refuses."""
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


if __name__ == "__main__":
    main()
