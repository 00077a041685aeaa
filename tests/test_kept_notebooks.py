"""Notebooks have outputs before they run: of these cells and this version, short, small, and without traces of a machine."""

import hashlib
import json
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MOST_BYTES = 300_000
MOST_LINES = 45  # of what a cell prints: a screen
TRACES = re.compile(rf"/(?:work|root|home|tmp|usr)/|{re.escape(socket.gethostname())}|[Ww]arning|Traceback|\r|\x1b|%\|")


def faults(notebook: dict[str, Any]) -> list[str]:
    """Outputs of `notebook` that should not be there, and code cells that did not run in order."""
    found = []
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        texts = []
        for output in cell["outputs"]:
            texts.append("".join(output.get("text", output.get("data", {}).get("text/plain", ""))))
            if output["output_type"] == "error" or output.get("name") == "stderr":
                found.append(f"cell {number}: an error, or a line on stderr")
        text = "".join(texts)
        if trace := TRACES.search(text):
            found.append(f"cell {number}: {trace[0]!r}")
        if text.count("\n") > MOST_LINES:
            found.append(f"cell {number}: {text.count(chr(10))} lines")
        if cell["execution_count"] != number:
            found.append(f"cell {number}: did not run in order")
    return found


@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_of_this_source_and_version_and_say_nothing_of_the_machine(source):
    path = source.with_suffix(".ipynb")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert notebook["metadata"]["detspec"] == {"source": digest, "version": VERSION}, "`make pairs` writes it anew"
    assert faults(notebook) == []
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < MOST_BYTES


def test_faults_are_found():
    def cell(number: int, text: str, **fields: Any) -> dict[str, Any]:
        output = {"output_type": "stream", "name": "stdout", "text": [text], **fields}
        return {"cell_type": "code", "execution_count": number, "outputs": [output]}

    long = "line\n" * (MOST_LINES + 1)
    cells = [cell(1, "fine"), cell(2, "in /tmp/x"), cell(3, long), cell(4, "", name="stderr"), cell(6, " 1%|")]
    found = faults({"cells": [{"cell_type": "markdown", "source": "/tmp/"}, *cells]})
    assert [fault.partition(":")[0] for fault in found] == ["cell 2", "cell 3", "cell 4", "cell 5", "cell 5"]
