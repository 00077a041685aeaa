"""Says something to people: a line on the standard error."""

import sys

INTERRUPTED = 130  # the exit code that a shell reports after Ctrl-C


def say(line: str) -> None:
    """Writes `line` to the standard error at once."""
    print(f"detspec: {line}", file=sys.stderr, flush=True)
