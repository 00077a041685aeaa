"""Compiled programs as one file of bounded size, which is carried from one machine to the next: a tar of compressed files."""

import io
import tarfile
import zlib
from pathlib import Path

MAX_BYTES = 16 << 20
BLOCK = 512  # a file's header in a tar, and what its contents are rounded up to
END = 10240  # what a tar is rounded up to


def unpack(file: Path, folder: Path) -> int:
    """Unpacks `file` into `folder`; returns how many files there were, 0 if there is no such file."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not file.exists():
        return 0
    with tarfile.open(file) as tar:
        members = [member for member in tar.getmembers() if member.isfile() and _is_below(member.name)]
        for member in members:
            path = folder / member.name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(zlib.decompress(tar.extractfile(member).read()))
            path.chmod(0o600)
    return len(members)


def pack(folder: Path, file: Path, *, max_bytes: int = MAX_BYTES) -> list[str]:
    """Writes the files of `folder` to `file`, the smallest first, as long as they fit; returns the names of those left out.

    What XLA has found by tuning is small, so all of it is kept. Files that are being written or removed meanwhile are left out
    without a word.
    """
    found = [(size, path) for path in folder.rglob("*") if path.suffix != ".part" and (size := _size(path)) is not None]
    paths = [path for _, path in sorted(found)]
    left = max_bytes - END
    left_out = []
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in paths:
            try:
                content = zlib.compress(path.read_bytes())
            except FileNotFoundError:
                continue
            size = BLOCK + -(-len(content) // BLOCK) * BLOCK
            if size > left:
                left_out.append(str(path.relative_to(folder)))
                continue
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            left -= size
    part.replace(file)
    return left_out


def _size(path: Path) -> int | None:
    """Bytes of a file; None for a folder, and for what is no longer there."""
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None


def _is_below(name: str) -> bool:
    """Whether a file of this name lies in the folder that it is unpacked into."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts
