"""Says something to people: a line on the standard error."""

import sys


def say(line: str) -> None:
    """Writes `line` to the standard error at once."""
    print(f"detspec: {line}", file=sys.stderr, flush=True)
