"""Which of every other budget and split have equal bits; for a process that runs its products untuned."""

from collections.abc import Iterator
from functools import cache, partial

from detspec.bench.bench import random_model
from prove_stages.examine import budget_measurements, budget_programs
from prove_stages.programs import Measurement, Program, Setting

EVERY_OTHER = slice(None, None, 2)  # what is left of the time is short


def programs(setting: Setting) -> Iterator[Program]:
    """Passes of every budget."""
    yield from budget_programs(setting, EVERY_OTHER)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Rows, then splits."""
    yield from budget_measurements(setting, cache(partial(random_model, setting.size.examined)), EVERY_OTHER)
