#!/usr/bin/env python
"""Builds the documentation site without network, and fails where a link, an anchor or a reference leads nowhere.

    python scripts/make_site.py         # into out/site; docs/zensical.toml says how it looks

1. `site_pages/gather.py` copies pages into out/pages: Markdown of the repository with its links rewritten, notebooks with
   the outputs kept in them, what each command's --help prints, and a page for each group of public names.
2. zensical turns them into HTML; mkdocstrings puts docstrings in. A warning of either ends the build.
3. `site_pages/check.py` reads the HTML: links, anchors, and that nothing is loaded from another host.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from site_pages import check, gather  # noqa: E402

OUT = ROOT / "out"
PAGES = OUT / "pages"
SITE = OUT / "site"
SETTINGS = ROOT / "docs" / "zensical.toml"  # whose site must lie below it, so a copy of it does
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
COMPLAINT = re.compile(r"\b(?:warning|error)\b", re.IGNORECASE)  # what mkdocstrings logs does not end zensical's build


def main() -> int:
    """Builds and checks; 1 with a line for each error."""
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        gather.gather(ROOT, PAGES)
    except ValueError as error:
        return report(str(error).splitlines())
    if complaints := build():
        return report(complaints)
    if found := list(check.errors(SITE)):
        return report(found)
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}: links, anchors and references lead somewhere")
    return 0


def build() -> list[str]:
    """Turns the pages into HTML; returns what zensical and mkdocstrings complain of, if they do."""
    command = [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict"]
    shutil.copyfile(SETTINGS, OUT / SETTINGS.name)
    done = subprocess.run(command, cwd=OUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    said, _, trace = COLOUR.sub("", done.stdout).partition("Traceback (most recent call last)")  # how it ends after warnings
    if not done.returncode and not COMPLAINT.search(said):
        return []
    return [*said.splitlines(), *trace.splitlines()[-1:], f"zensical build --strict: exit code {done.returncode}"]


def report(lines: list[str]) -> int:
    """Prints `lines` where errors go; returns the exit code of a failure."""
    print("\n".join(lines), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
