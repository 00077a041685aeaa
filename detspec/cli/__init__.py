"""The command line: `detspec --help`."""

from detspec.cli.commands import main

__all__ = ["main"]
