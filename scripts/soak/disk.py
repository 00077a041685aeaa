"""A folder on a disk of its own, which gets full and is enlarged; where mounting is not permitted, an ordinary folder."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

AMPLE_BYTES = 64 << 20


class Disk:
    """A folder whose disk may be resized."""

    def __init__(self, folder: Path, *, mounts: bool) -> None:
        """The empty `folder`, on a disk of its own if `mounts` and the system permits it."""
        self.folder = folder
        self.is_mounted = mounts and _run("mount", "-t", "tmpfs", "-o", f"size={AMPLE_BYTES}", "tmpfs", str(folder))

    def leave(self, num_bytes: int | None) -> None:
        """Resizes the disk so that `num_bytes` more fit, to whole pages; None for ample room."""
        if self.is_mounted:
            status = os.statvfs(self.folder)
            used = (status.f_blocks - status.f_bfree) * status.f_frsize
            size = AMPLE_BYTES if num_bytes is None else used + num_bytes
            assert _run("mount", "-o", f"remount,size={size}", str(self.folder)), f"{self.folder} cannot be resized"


@contextlib.contextmanager
def empty_folder(folder: Path, *, mounts: bool) -> Iterator[Disk]:
    """The folder, emptied, on a disk of its own if `mounts`; afterwards it is gone."""
    _remove(folder)
    folder.mkdir(parents=True)
    try:
        yield Disk(folder, mounts=mounts)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    if folder.is_mount():
        _run("umount", "--lazy", str(folder))  # also if a process that was left behind still uses it
    shutil.rmtree(folder, ignore_errors=True)


def _run(*command: str) -> bool:
    """Whether the command could be run, and succeeded."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
