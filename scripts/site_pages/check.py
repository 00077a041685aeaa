"""Checks a built site: every link and anchor leads somewhere, and no page loads anything from another host."""

import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src"}
LOADING_RELS = {"stylesheet", "icon", "preconnect", "preload", "prefetch", "modulepreload", "dns-prefetch", "manifest"}
LOADED_BY_CSS = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)")
UNRESOLVED = re.compile(r"<autoref\b|\]\[[\w.]+\]")  # a reference that became no link


class Page(HTMLParser):
    """Links of a page, files that it loads, and anchors that others can link to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.prose: list[str] = []
        self._in_code = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes what a tag says of links, anchors and resources."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and LOADING_RELS & set(values.get("rel", "").split()):
            self.loaded.append(values.get("href", ""))
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])
        self.loaded += LOADED_BY_CSS.findall(values.get("style", ""))
        self._in_code += tag in ("code", "pre", "script", "style")
        if tag == "autoref":
            self.prose.append("<autoref")

    def handle_endtag(self, tag: str) -> None:
        """Leaves code."""
        self._in_code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        """Takes the text outside of code."""
        if not self._in_code:
            self.prose.append(data)


def errors(site: Path) -> Iterator[str]:
    """A line for each error of the site in the folder `site`."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no pages"
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in page.links:
            if error := _link_error(site, path, target, pages):
                yield f"{name}: {error}"
        for target in page.loaded:
            if urlsplit(target).netloc:
                yield f"{name}: loads {target} from another host"
            elif not target.startswith("data:") and not _file(site, path, target).is_file():
                yield f"{name}: loads {target}, which does not exist"
        for reference in UNRESOLVED.findall("".join(page.prose)):
            yield f"{name}: {reference} is a reference that was not resolved"
    for path in sorted(site.rglob("*.css")):
        for target in LOADED_BY_CSS.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: loads {target} from another host"


def _link_error(site: Path, path: Path, target: str, pages: dict[Path, Page]) -> str:
    """Error of a link from the page at `path`; "" if there is none, or if the link leads to another host."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return ""
    file = _file(site, path, target)
    if not file.is_file():
        return f"links to {target}, which does not exist"
    anchor = unquote(parts.fragment)
    if anchor and file in pages and anchor not in pages[file].anchors:
        return f"links to {target}, and there is no such place on that page"
    return ""


def _file(site: Path, path: Path, target: str) -> Path:
    """The file that the page at `path` calls `target`."""
    place = unquote(urlsplit(target).path)
    if not place:
        return path
    base = site if place.startswith("/") else path.parent
    file = Path(os.path.normpath(base / place.lstrip("/")))
    return file / "index.html" if file.is_dir() else file
