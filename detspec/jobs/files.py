"""The files of a job: their names, and how they are written whole or not at all."""

import contextlib
import errno
import glob
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from detspec.errors import InputError

STDIO = "-"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ROOM_CODE = 3  # exit code when the disk is full
SHARD_SUFFIX = re.compile(r"\.(\d{5})-of-(\d{5})$")


def sibling(out: Path, what: str) -> Path:
    """`out.jsonl`, "stats" -> `out.stats.json`; the same for "manifest", but "rejects" -> `out.rejects.jsonl`, and "errors"."""
    return out.with_name(f"{_stem(out)}.{what}.{'jsonl' if what in ('rejects', 'errors') else 'json'}")


def journal_path(out: Path) -> Path:
    """`out.jsonl` -> `out.jsonl.journal`."""
    return out.with_name(f"{out.name}.journal")


def shard_path(out: Path, index: int, count: int) -> Path:
    """Shard 2 of 4: `out.jsonl` -> `out.00002-of-00004.jsonl`."""
    stem = _stem(out)
    return out.with_name(f"{stem}.{index:05}-of-{count:05}{out.name[len(stem) :]}")


def find_shards(out: Path) -> dict[tuple[int, int], Path]:
    """The shards of `out` in its folder, by (index, count)."""
    stem = _stem(out)
    found = {}
    for path in sorted(out.parent.glob("*" + out.name[len(stem) :])):
        match = SHARD_SUFFIX.search(_stem(path))
        if match and path == shard_path(out, *(key := (int(match[1]), int(match[2])))):
            found[key] = path
    return found


def check_out(out: str, prompts: str) -> None:
    """Raises `InputError` if `out` is the input itself or no regular file, or its folder is missing or not writable."""
    if out == STDIO:
        return
    folder = Path(out).parent
    if Path(out).is_dir():
        raise InputError(f"--out {out} is a folder: name a file in it")
    if Path(out).exists() and not Path(out).is_file():
        raise InputError(
            f'--out {out} is a device or a pipe, which no job resumes: name a file, or "-" for the standard output'
        )
    if not folder.is_dir():
        raise InputError(f"--out {out}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: the folder {folder} is not writable")
    if prompts != STDIO and Path(out).exists() and Path(prompts).exists() and os.path.samefile(out, prompts):
        raise InputError(f"--out {out} is the file of prompts: name another file")


def pretty_json(value: object) -> bytes:
    """`value` as indented JSON that ends in a newline."""
    return json.dumps(value, indent=2).encode() + b"\n"


@contextlib.contextmanager
def new_files(*paths: Path) -> Iterator[Sequence[BinaryIO]]:
    """Temporary files that are renamed to `paths`, the first path last, once all are on disk; any exception deletes them."""
    temporary = [path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("xb")) for path in temporary]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for old, new in reversed(list(zip(temporary, paths, strict=True))):
            os.replace(old, new)
        sync_folder(paths[0].parent)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def new_file_once(path: Path, content: bytes) -> bool:
    """Writes a file whole, unless there is one; whether it was written. Of several processes, one writes it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        os.link(temporary, path)  # unlike a rename, it fails if the name is taken
    except FileExistsError:
        return False
    except OSError:  # a file system without links: the last one wins, and all write the same but for how their engines run
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def remove_leftovers(*paths: Path) -> None:
    """Deletes temporary files of `new_files` for `paths` that killed processes left; none may be writing them now."""
    for path in paths:
        for left in path.parent.glob(f".{glob.escape(path.name)}.????????.tmp"):
            left.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stem(out: Path) -> str:
    return out.name.removesuffix(".jsonl").removesuffix(".json")
