"""The process of the command `detspec`, also started by `python -m detspec`."""

import gc
import sys

from detspec.cli.commands import main


def run() -> int:
    """Runs the subcommand that the process was started with; returns its exit code.

    Imports and traces make half a million objects that live until the end. Python's collector would search them at every turn,
    and twice more at the end: 0.3 s of a short command.
    """
    gc.set_threshold(10_000)
    try:
        return main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    sys.exit(run())
