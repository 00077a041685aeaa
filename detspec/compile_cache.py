"""Compiled programs in a folder of the user's, for the next process: a bounded number of bytes, private, checked when read.

A program is found by a name: a SHA-256 over its text and all else that compilers look at. A program is code that is run, and
its file is unpickled, so a folder that others can write to is not used.
"""

import contextlib
import hashlib
import json
import os
import stat
import warnings
from pathlib import Path

import jax

from detspec.environment import FLAGS, fingerprint

VARIABLE = "DETSPEC_COMPILE_CACHE"  # a folder, or "off"
OFF = "off"
MAX_BYTES = 2 << 30
SUFFIX = ".program"
DIGEST_BYTES = hashlib.sha256().digest_size
# Settings of jax that change neither a program nor what it computes.
IRRELEVANT = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_traceback", "jax_explain")


class CompileCache:
    """Files in one folder, each a digest and what it is of; the least recently used go when they are too many bytes."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def name(self, *made_from: str) -> str:
        """The name of a program of these texts, for this device and these settings."""
        return hashlib.sha256(json.dumps([_surroundings(), made_from]).encode()).hexdigest()

    def read(self, name: str) -> bytes | None:
        """Returns what was written under `name`, or None. A damaged file is removed, with a warning."""
        path = self.folder / f"{name}{SUFFIX}"
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        content = raw[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != raw[:DIGEST_BYTES]:
            self.drop(name, "it is damaged")
            return None
        with contextlib.suppress(OSError):  # the folder may be read-only by now
            os.utime(path)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Keeps `content` under `name`: the file appears whole or not at all. A full disk costs only a warning."""
        part = self.folder / f"{name}.{os.getpid()}.part"
        try:
            part.touch(mode=0o600)
            part.write_bytes(hashlib.sha256(content).digest() + content)
            os.replace(part, self.folder / f"{name}{SUFFIX}")
        except OSError as error:
            part.unlink(missing_ok=True)
            warnings.warn(f"a compiled program was not kept in {self.folder}: {error.strerror}", stacklevel=2)
        self._shrink()

    def drop(self, name: str, why: str) -> None:
        """Removes what was written under `name`, with a warning."""
        warnings.warn(f"a compiled program in {self.folder} is not used: {why}. It is compiled again", stacklevel=2)
        (self.folder / f"{name}{SUFFIX}").unlink(missing_ok=True)

    def _shrink(self) -> None:
        """Removes the least recently used files above `max_bytes`, also parts that a killed process left."""
        with contextlib.suppress(FileNotFoundError):  # another process may shrink, too
            with os.scandir(self.folder) as entries:
                files = [(entry.stat(), entry.path) for entry in entries]
            num_bytes = sum(status.st_size for status, _ in files)
            for status, path in sorted(files, key=lambda file: file[0].st_mtime):
                if num_bytes <= self.max_bytes:
                    return
                os.remove(path)
                num_bytes -= status.st_size


def user_cache() -> CompileCache | None:
    """The cache in the user's cache folder, or in the folder that DETSPEC_COMPILE_CACHE names.

    None if that is "off", if the user has given jax a cache of its own, or, with a warning, if the folder cannot be made or is
    not the user's alone.
    """
    theirs = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not os.environ.get(VARIABLE) and theirs not in (None, "", str(_jax_folder())):
        return None
    return kernel_cache()


def kernel_cache() -> CompileCache | None:
    """The cache of `user_cache`, also if jax has one, which does not keep what other compilers make."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == OFF:
        return None
    folder = Path(chosen) if chosen else _home() / "programs"
    return CompileCache(folder) if _is_fit(folder) else None


def enable_jax_cache() -> None:
    """Lets jax itself keep what else this process compiles, next to our programs; for commands, before they compile.

    Each fingerprint has its own folder, since different machines may share a home folder. Does nothing if the user has given
    jax a cache, or switched ours off.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") or os.environ.get(VARIABLE) == OFF or not _is_fit(_jax_folder()):
        return
    jax.config.update("jax_compilation_cache_dir", str(_jax_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # there are many small programs


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "detspec"


def _jax_folder() -> Path:
    machine = json.dumps(fingerprint(), sort_keys=True)
    return _home() / "xla" / hashlib.sha256(machine.encode()).hexdigest()[:16]


def _is_fit(folder: Path) -> bool:
    """Whether `folder`, which is made if it is missing, can hold programs; if not, there is a warning."""
    why = _unfit(folder)
    if why:
        warnings.warn(f"compiled programs are not kept in {folder}: {why}; {VARIABLE} names another folder", stacklevel=3)
    return not why


def _unfit(folder: Path) -> str:
    """Why `folder`, which is made if it is missing, cannot hold programs; "" if it can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it (chmod go-w)"
    return "" if os.access(folder, os.W_OK) else "it cannot be written to"


def _surroundings() -> list[object]:
    """All that programs depend on besides their text: versions, device, and settings of jax and XLA."""
    settings = {name: repr(value) for name, value in jax.config.values.items() if not name.startswith(IRRELEVANT)}
    flags = {name: os.environ.get(name, "") for name in FLAGS}
    return [fingerprint(), settings, flags]
