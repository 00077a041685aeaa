"""The C compiler that makes the CPU kernels."""

import os
import shutil

COMPILERS = ("cc", "gcc", "clang")
NO_COMPILER = (
    "the CPU kernels are compiled on first use, and no C compiler was found: install gcc or clang, or name one in the "
    "environment variable CC"
)


def find_compiler() -> str | None:
    """The compiler that the environment variable CC names, or else the first of `COMPILERS` that is installed."""
    chosen = os.environ.get("CC")
    return next(filter(None, map(shutil.which, (chosen,) if chosen else COMPILERS)), None)
