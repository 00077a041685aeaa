"""Saves pictures as files, and reports a missing matplotlib."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from detspec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: "Figure", path: str | Path) -> list[Path]:
    """Writes `path.svg` (equal figures give equal bytes) and `path.png` without a display. Returns the two paths."""
    import matplotlib

    written = [Path(f"{path}.svg"), Path(f"{path}.png")]
    written[0].parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "detspec", "svg.fonttype": "path"}):
        figure.savefig(written[0], metadata={"Date": None})
        figure.savefig(written[1], dpi=150)
    return written


@contextlib.contextmanager
def matplotlib_needed() -> Iterator[None]:
    """Wrap imports of matplotlib in this: if it is missing, raises `InputError` with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise InputError('pictures need matplotlib: pip install "detspec[plots]"') from error
