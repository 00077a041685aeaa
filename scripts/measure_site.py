#!/usr/bin/env python
"""Opens each page of the built site in Chromium, and fails where one is wider than a phone or asks for what is not there.

    make docs
    python scripts/measure_site.py                         # needs chromium or chrome on the path
    python scripts/measure_site.py index.html using.html   # also draws these pages into out/looks

Names a page that is wider than the screen of a phone, and the outermost element that is too wide. Tables and code may be wider:
they scroll inside their own box. Draws the upper part of a page, as a phone and as a desktop show it.
"""

import argparse
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from site_pages import browser  # noqa: E402

PHONE = (390, 844)  # pixels of CSS
DESKTOP = (1280, 800)
# Width of the page, and the outermost element that sticks out of the screen and is in no box that scrolls or hides it.
WIDTH = """(() => {
  const isBoxed = (e) => e && (getComputedStyle(e).overflowX !== "visible" || isBoxed(e.parentElement))
  const isWide = (e) => e.getBoundingClientRect().right > SCREEN + 1 && getComputedStyle(e).position !== "fixed"
  const wide = [...document.body.querySelectorAll("*")].find((e) => isWide(e) && !isBoxed(e.parentElement))
  return [document.documentElement.scrollWidth, wide ? wide.outerHTML.slice(0, 120) : ""]
})()"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is wrong; 1 if anything is, or if there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draw", nargs="*", metavar="PAGE", help="a page to draw, such as using.html")
    parser.add_argument("--site", type=Path, default=ROOT / "out" / "site", help="the built site")
    parser.add_argument("--pictures", type=Path, default=ROOT / "out" / "looks", help="folder for the pictures")
    args = parser.parse_args(argv)
    program = browser.browser_path()
    pages = sorted(path.relative_to(args.site).as_posix() for path in args.site.rglob("*.html"))
    if program is None or not pages:
        print(f"needs one of {', '.join(browser.NAMES)} on the path, and a site in {args.site} (make docs)", file=sys.stderr)
        return 1
    with served(args.site) as address, browser.tab(program) as tab:
        found = {page: wrong for page in pages if (wrong := list(errors(tab, f"{address}/{page}")))}
        for page in args.draw:
            draw(tab, f"{address}/{page}", args.pictures / page)
    for page, wrong in found.items():
        print(*(f"{page}: {line}" for line in wrong), sep="\n", file=sys.stderr)
    print(f"{len(pages)} pages, {len(found)} wider than a phone's {PHONE[0]} pixels or with requests that failed")
    return 1 if found else 0


def errors(tab: browser.Tab, address: str) -> Iterator[str]:
    """A line for each error of the page at `address`."""
    tab.show_as(*PHONE, phone=True)
    tab.open(address)
    width, element = tab.value(WIDTH.replace("SCREEN", str(PHONE[0])))
    if width > PHONE[0] or element:
        yield f"{width} pixels wide: {element}"
    yield from tab.failed


def draw(tab: browser.Tab, address: str, path: Path) -> None:
    """Writes a picture for each of the two screens, next to each other in the folder of `path`."""
    for screen, (width, height) in {"phone": PHONE, "desktop": DESKTOP}.items():
        tab.show_as(width, height, phone=screen == "phone")
        tab.open(address)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.stem}_{screen}.webp").write_bytes(tab.picture(quality=35))


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves `folder` at localhost; yields the address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing of it."""

    def log_message(self, *args: object) -> None:
        """Says nothing."""


if __name__ == "__main__":
    sys.exit(main())
