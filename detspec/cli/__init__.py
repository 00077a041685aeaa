"""The command line: `detspec --help`."""

from detspec.cli.main import main

__all__ = ["main"]
