"""Notebooks as pages: with outputs if they were executed as they are, else without."""

import re
from pathlib import Path

import jupytext
from nbconvert import MarkdownExporter
from nbformat import NotebookNode

# What cells print becomes a block of its own kind, which site.css sets apart from code.
TEMPLATE = """{% extends "markdown/index.md.j2" %}
{% block stream %}
```output
{{ output.text.rstrip() | strip_ansi }}
```
{% endblock %}
{% block data_text %}
```output
{{ output.data["text/plain"] | strip_ansi }}
```
{% endblock %}
"""
TITLE = re.compile(r"^# .+$", re.MULTILINE)
NOT_EXECUTED = "*Shown without outputs: `make notebooks` had not executed it when this page was made.*"


def notebook_page(source: Path, executed: Path) -> tuple[str, dict[str, bytes]]:
    """Markdown of the notebook `source`, cells in a `.py`, and its pictures by their path from the page.

    Outputs come from `executed`, which `make notebooks` writes, if its cells are those of `source`.
    """
    notebook = jupytext.read(source)
    found = jupytext.read(executed) if executed.exists() else None
    has_outputs = found is not None and cells(found) == cells(notebook)
    shown = found if has_outputs else notebook
    shown.metadata["language_info"] = {"name": "python"}
    files = {"unique_key": source.stem, "output_files_dir": f"{source.stem}_files"}
    text, resources = MarkdownExporter(raw_template=TEMPLATE).from_notebook_node(shown, resources=files)
    if not has_outputs:
        text = TITLE.sub(rf"\g<0>\n\n{NOT_EXECUTED}", text, count=1)
    return text, resources["outputs"]


def cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    """Kind and source of each cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]
