"""Keeps notebooks in pairs: cells in a `.py`, and the same cells with the outputs of one run in the `.ipynb` next to it.

    python scripts/pair_notebooks.py          writes each .ipynb; its cells run if their code, or detspec's version, is new
    python scripts/pair_notebooks.py --check  runs all into out/notebooks, and compares them with what is kept

`make pairs` and `make notebooks` call it.
"""

import base64
import hashlib
import io
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from notebook_address import PROJECT, REPOSITORY, ROOT, with_address
from PIL import Image

SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
EXECUTED = ROOT / "out" / "notebooks"
CHECKED_AT_A_TIME = 2  # and one is written at a time, so that timings which are kept are not those of a busy machine
SECONDS = 1200  # that a cell may take before its run ends, on a busy machine
WORK = re.compile(rf"{re.escape(tempfile.gettempdir())}/detspec-\w+/")  # where notebooks write; each run has another
COLOURS = 128  # in a picture, which takes a quarter of the bytes then


def main(*, is_check: bool) -> int:
    """Writes all `.ipynb`, or checks them; the exit code."""
    EXECUTED.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(CHECKED_AT_A_TIME if is_check else 1) as threads:
        complaints = [line for lines in threads.map(checked if is_check else written, SOURCES) for line in lines]
    if complaints:
        print(*complaints, "remove such an .ipynb; `make pairs` writes it anew", sep="\n", file=sys.stderr)
    return len(complaints) > 0


def written(source: Path) -> list[str]:
    """Writes `source` with the project's address, and its `.ipynb`; there are no complaints."""
    source.write_text(with_address(source.read_text(encoding="utf-8"), source.stem, REPOSITORY), encoding="utf-8")
    notebook = read(source)
    path = source.with_suffix(".ipynb")
    ran = nbformat.read(path, as_version=4) if path.exists() else None
    if ran is None or codes(ran) != codes(notebook) or ran.metadata.get("detspec", {}).get("version") != PROJECT["version"]:
        ran = run(source)
    for number, (cell, old) in enumerate(zip(code_cells(notebook), code_cells(ran), strict=True), 1):
        cell.update(execution_count=number, outputs=old.outputs)
    nbformat.write(notebook, path)
    return []


def checked(source: Path) -> list[str]:
    """Complaints about the `.ipynb` of `source`, after a run of its cells."""
    name = source.with_suffix(".ipynb").name
    kept = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    notebook = read(source)
    if sources(kept) != sources(notebook) or kept.metadata.get("detspec") != notebook.metadata.detspec:
        return [f"{name} is not of its .py, or of another version"]
    pairs = zip(code_cells(kept), code_cells(run(source)), strict=True)
    return [
        f"{name}, code cell {number}: {kinds(old)} was kept, {kinds(new)} came"
        for number, (old, new) in enumerate(pairs, 1)
        if kinds(old) != kinds(new)
    ]


def read(source: Path) -> NotebookNode:
    """The notebook of `source`, without outputs."""
    notebook = jupytext.read(source)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    notebook.metadata = NotebookNode(
        kernelspec=notebook.metadata.kernelspec,
        language_info={"name": "python"},
        jupytext={"formats": "ipynb,py:percent"},
        detspec={"version": PROJECT["version"], "source": digest},
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # drawn at random otherwise
    return notebook


def run(source: Path) -> NotebookNode:
    """The notebook of `source` after a run of its cells, with tidied outputs; it is also left in `EXECUTED`."""
    print(f"executing notebooks/{source.name}", flush=True)
    notebook = read(source)
    settings = {"timeout": SECONDS, "record_timing": False, "coalesce_streams": True, "extra_arguments": ["--log-level=ERROR"]}
    NotebookClient(notebook, resources={"metadata": {"path": str(source.parent)}}, **settings).execute()
    for cell in code_cells(notebook):
        cell.outputs = [tidied(output) for output in cell.outputs]
    nbformat.write(notebook, EXECUTED / f"{source.stem}.ipynb")
    return notebook


def sources(notebook: NotebookNode) -> list[tuple[str, str]]:
    """Kind and source of each cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def codes(notebook: NotebookNode) -> list[str]:
    """Source of each cell that runs."""
    return [cell.source for cell in code_cells(notebook)]


def kinds(cell: NotebookNode) -> list[str]:
    """Kinds of outputs of a cell. Their content differs between machines: timings, and texts of models."""
    shown = [output.get("data", {}) for output in cell.outputs if output.get("name") != "stderr"]
    return sorted({"a picture" if "image/png" in data else "text" for data in shown})


def tidied(output: NotebookNode) -> NotebookNode:
    """An output without the folder that the run worked in, and with few colours in its picture."""
    if "text" in output:
        output.text = WORK.sub("", output.text)
    if "image/png" in output.get("data", {}):
        picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
        file = io.BytesIO()
        picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(file, "png", optimize=True)
        output.data = NotebookNode({"image/png": base64.b64encode(file.getvalue()).decode()})
    return output


if __name__ == "__main__":
    raise SystemExit(main(is_check="--check" in sys.argv[1:]))
