"""Keeps a job from writing over files that are not its own: the output of another job, or what no job wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detspec.errors import InputError
from detspec.jobs.files import journal_path, sibling
from detspec.jobs.journal import read_journal
from detspec.jobs.manifest import complete_manifest, differences, header_of, read_manifest
from detspec.read_json import parse_json

WRITTEN = ("manifest", "stats", "errors", "rejects")  # next to the output
FRESH = "name another --out, or write over it with --fresh"
REJECT_KEYS = {"line", "error", "raw"}


def check_free(out: Path, header: Mapping[str, Any], instead: str = FRESH) -> None:
    """Raises `InputError` if the job with `header` would write over what is not its own; `instead` says what else to do.

    Its own are an empty file, its whole output, and all that lies next to its journal: the job began when they were free.
    """
    if read_journal(journal_path(out), header) is not None or complete_manifest(out, header) is not None:
        return
    manifest = read_manifest(out)
    if manifest is None:
        rejects = sibling(out, "rejects")
        for path in (out, *(sibling(out, what) for what in WRITTEN)):
            if path.exists() and path.stat().st_size and not (path == rejects and _holds_rejects(path)):
                raise InputError(f"{path} is there already, and no manifest says that a job wrote it: {instead}")
        return
    if parts := "; ".join(differences(header_of(manifest), header, them="it")):
        manifest_of = f"{out} is gone, but {sibling(out, 'manifest')} is there, the manifest"
        what = f"{out} is the output" if out.exists() else manifest_of
        raise InputError(f"{what} of another job: {parts}: {instead}")
    if out.exists():
        raise InputError(f"{out} was changed since its job wrote it: {instead}")


def _holds_rejects(path: Path) -> bool:
    """Whether it holds rejected lines, as a job leaves that ended before its first completion."""
    with path.open("rb") as file:
        try:
            first = parse_json(file.readline())
        except InputError:
            return False
    return isinstance(first, dict) and first.keys() == REJECT_KEYS
