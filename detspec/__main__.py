"""The process of the command `detspec`, also started by `python -m detspec`."""

import gc
import sys
import traceback
import warnings

from detspec.cli.commands import BAD_INPUT, main
from detspec.say import say

CRASHED = 70  # as sysexits.h has it; Python's own 1 would say that requests failed, or that records do not reproduce


def run() -> int:
    """Runs the subcommand that the process was started with; returns its exit code, 70 with a traceback if it crashed.

    Warnings are lines like all others that the command says, without the place in the code.

    Imports and traces make half a million objects that live until the end. Python's collector would search them at every turn,
    and twice more at the end: 0.3 s of a short command.
    """
    gc.set_threshold(10_000)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say(f"warning: {message}")
            return main()
    except Exception as error:
        if package := missing_package(error):
            say(f"error: {package} is not installed for {sys.executable}: `pip install .` in the checkout installs it")
            return BAD_INPUT
        traceback.print_exc()
        return CRASHED
    finally:
        gc.freeze()


def missing_package(error: Exception) -> str:
    """The package that an error finds missing, "" if none; `detspec` itself in a checkout that is not installed."""
    name = str(error.name) if isinstance(error, ModuleNotFoundError) and error.name else ""
    return "" if name.startswith("detspec.") else name


if __name__ == "__main__":
    sys.exit(run())
