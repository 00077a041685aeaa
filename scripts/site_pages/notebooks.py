"""Notebooks as pages, with the outputs that are kept in them."""

from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

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


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Markdown of the notebook at `path`, an `.ipynb`, and its pictures by their path from the page."""
    files = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    notebook = nbformat.read(path, as_version=4)
    text, resources = MarkdownExporter(raw_template=TEMPLATE).from_notebook_node(notebook, resources=files)
    return text, resources["outputs"]
