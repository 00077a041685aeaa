"""Where compiled programs are kept."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

FOLDER_OF_JAX = "jax_compilation_cache_dir"


def use_cache(folder: Path, *, alone: bool = False) -> None:
    """Keeps compiled programs in `folder`; `alone` also leaves jax's own cache, if it has one, so that all is compiled anew."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    if alone:
        os.environ.pop(FOLDER_OF_JAX.upper(), None)
        use_jax_cache(None)


def use_jax_cache(folder: str | None) -> None:
    """Lets jax keep programs in `folder`, None for nowhere."""
    jax.config.update(FOLDER_OF_JAX, folder)
    compilation_cache.reset_cache()
