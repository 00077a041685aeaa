"""Gathers the pages of the site in one folder, with links between them, and the files that they link to.

1. `docs/README.md` lists the pages. What it links to is a page: Markdown of the repository, every notebook, every public name
   of the package, every command.
2. Each page gets its place in the folder, and its links are rewritten from places in the repository to places in the folder.
3. A file that is linked to, but is no page, comes along.
"""

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from site_pages import markdown, notebooks, reference
from site_pages.markdown import Link

LISTED = Path("docs/README.md")
SUMMARY = "SUMMARY.md"  # the list with places in the folder, which the site takes for its navigation
NOTEBOOKS = Path("notebooks")
PYTHON = Path("detspec/__init__.py")
PYTHON_PAGE = "reference/index.md"
COMMANDS = Path("detspec/cli/commands.py")
COMMANDS_PAGE = "reference/commands.md"
STYLE = "site.css"


def gather(root: Path, out: Path) -> None:
    """Writes all pages of the repository `root` into the folder `out`.

    Raises `ValueError` with a line for each link that leads nowhere.
    """
    folder = Folder(root, out)
    for source, page in folder.pages.items():
        if source.suffix == ".md":
            text = folder.relinked(folder.text(source), source, page)
            folder.write(page, markdown.with_blank_before_lists(text))
    for source in folder.notebooks:
        text, pictures = notebooks.notebook_page(root / source.with_suffix(".ipynb"))
        page = folder.pages[source]
        folder.write(page, folder.relinked(text, source, page, own=pictures))
        for name, data in pictures.items():
            folder.write(str(PurePosixPath(page).parent / name), data)
    made = {**reference.python_pages(), PYTHON_PAGE: reference.overview(), COMMANDS_PAGE: reference.commands_page()}
    for page, text in made.items():
        folder.write(page, text)
    folder.write(SUMMARY, "".join(f"{line}\n" for line in folder.navigation()))
    shutil.copyfile(root / "docs" / STYLE, out / STYLE)
    if folder.errors:
        raise ValueError("\n".join(folder.errors))


class Folder:
    """Places of the repository's files in the folder `out`.

    Attributes:
        notebooks: sources of the notebooks.
        pages: place in the folder, by source.
        errors: what is wrong with links so far.
    """

    def __init__(self, root: Path, out: Path) -> None:
        self.root = root
        self.out = out
        self.errors: list[str] = []
        self.notebooks = [path.relative_to(root) for path in sorted((root / NOTEBOOKS).glob("*.py"))]
        listed = [resolved(LISTED, link.path) for link in markdown.links(self.text(LISTED))]
        self.pages = {source: page_of(source) for source in listed if source.suffix == ".md"}
        for source in self.notebooks:
            self.pages[source] = self.pages[source.with_suffix(".ipynb")] = f"{NOTEBOOKS}/{source.stem}.md"

    def text(self, source: Path) -> str:
        """The content of a file of the repository."""
        return (self.root / source).read_text(encoding="utf-8")

    def write(self, place: str, content: str | bytes) -> None:
        """Writes the file `place` of the folder."""
        path = self.out / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    def relinked(self, text: str, source: Path, page: str, *, own: Collection[str] = ()) -> str:
        """`text` of `source` with links as `page` needs them, without images of other hosts.

        The files in `own` lie next to the page already.
        """

        def target_of(link: Link) -> str:
            if link.is_outside or not link.path or link.path in own:
                return link.target
            place = self.place_of(resolved(source, link.path))
            if place is None:
                self.errors.append(f"{source}:{link.line}: {link.target} is neither a page of {LISTED} nor another file")
                return link.target
            place, _, anchor = place.partition("#")
            relative = os.path.relpath(place, PurePosixPath(page).parent)
            anchor = link.anchor or anchor
            return f"{relative}#{anchor}" if anchor else relative

        return markdown.rewritten(markdown.without_outside_images(text), target_of)

    def place_of(self, target: Path) -> str | None:
        """Place of `target` of the repository in the folder, with an anchor if it is a part of a page; None if nowhere.

        A file that is no page is copied there.
        """
        made = {LISTED: "index.md", PYTHON: PYTHON_PAGE, COMMANDS: COMMANDS_PAGE, **reference.places_by_file(), **self.pages}
        if target in made:
            return made[target]
        if target.suffix == ".md" or not (self.root / target).is_file():
            return None
        place = target.relative_to("docs") if target.is_relative_to("docs") else Path("files", target)
        self.write(place.as_posix(), (self.root / target).read_bytes())
        return place.as_posix()

    def navigation(self) -> Iterator[str]:
        """The list of pages; where it links to the notebooks, or to the public names, a line for each page of them."""
        for line in self.text(LISTED).splitlines():
            targets = [resolved(LISTED, link.path) for link in markdown.links(line)]
            indent = line[: len(line) - len(line.lstrip())]
            if targets == [NOTEBOOKS]:
                for source in self.notebooks:
                    page = self.pages[source]
                    titles = markdown.headings((self.out / page).read_text(encoding="utf-8"))
                    _, title = next(titles, (1, source.stem))
                    yield f"{indent}* [{title}]({page})"
            elif targets == [PYTHON]:
                yield self.relinked(line, LISTED, SUMMARY)
                yield from (f"{indent}* [{group.title}]({page})" for page, group in reference.GROUPS.items())
            elif markdown.LIST_ITEM.match(line):
                yield self.relinked(line, LISTED, SUMMARY)


def page_of(source: Path) -> str:
    """Place of a page of the repository in the folder.

    README.md -> index.md    docs/mesh.md -> mesh.md    CONTRIBUTING.md -> contributing.md
    scripts/replications/llm42/README.md -> scripts/replications/llm42.md
    """
    if source == Path("README.md"):
        return "index.md"
    path = source.relative_to("docs") if source.is_relative_to("docs") else source
    path = path.parent.with_suffix(".md") if path.name == "README.md" else path.with_name(path.name.lower())
    return path.as_posix()


def resolved(source: Path, target: str) -> Path:
    """The path in the repository of what `source` calls `target`."""
    return Path(os.path.normpath(source.parent / target))
