"""Says something to people: a line on the standard error."""

import sys
import time

INTERRUPTED = 130  # the exit code that a shell reports after Ctrl-C


def say(line: str) -> None:
    """Writes `line` to the standard error at once."""
    print(f"detspec: {line}", file=sys.stderr, flush=True)


def stamped(worker: str, line: str) -> str:
    """`line` after the local time and the name of the `worker` that says it."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {worker}: {line}"
