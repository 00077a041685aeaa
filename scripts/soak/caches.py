"""Folders of compiled programs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from scripts.soak.disk import empty_folder


def use_cache(folder: Path, *, alone: bool = False) -> None:
    """Keeps compiled programs in `folder`; `alone` also leaves jax's own cache, if it has one, so that all is compiled anew."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    if alone:
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        _let_jax_use(None)


@contextmanager
def empty_cache(folder: Path, usual: Path) -> Iterator[None]:
    """In this context compiled programs are kept in `folder`, which is empty at first and gone afterwards; then in `usual`."""
    jax_folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    with empty_folder(folder, mounts=False):
        use_cache(folder, alone=True)
        try:
            yield
        finally:
            use_cache(usual)
            _let_jax_use(jax_folder)


def _let_jax_use(folder: str | None) -> None:
    """Lets jax keep programs in `folder`, None for nowhere."""
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
