"""`detspec` as one of several processes, each with a clock that is wrong in its own way.

Its arguments are a seed and those of `detspec`. Segments are short, so that there are many; at the end it says how many.
"""

import dataclasses
import sys

from detspec.cli import commands, options
from detspec.engine import certify, decide
from detspec.engine.agreement import Alone, Processes
from tests.processes.skewed_clock import SkewedClock


def main() -> int:
    skewed = SkewedClock(int(sys.argv[1]))
    decide.time = certify.time = skewed  # type: ignore[assignment]
    num_segments = 0

    def counted(started):
        def count(self, *args) -> None:
            nonlocal num_segments
            num_segments += 1
            started(self, *args)

        return count

    Alone.started = counted(Alone.started)  # type: ignore[method-assign]
    Processes.started = counted(Processes.started)  # type: ignore[method-assign]
    engine_config_of = options.engine_config_of
    options.engine_config_of = lambda *args: dataclasses.replace(engine_config_of(*args), segment_steps=2)
    try:
        return commands.main(sys.argv[2:])
    finally:
        print(f"segments {num_segments}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
