"""A step and a canonical pass of the model at its full depth."""

import dataclasses
from collections.abc import Iterator

from detspec.config import ModelConfig
from prove_stages.passes import of_depth, pass_program, schedules
from prove_stages.programs import Measurement, Program, Setting


def programs(setting: Setting) -> Iterator[Program]:
    """Both."""
    for schedule in schedules(setting, *rows(setting)):
        yield pass_program(setting, model(setting), schedule)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """One for each, then the ratio."""
    yield from of_depth(setting, model(setting), *rows(setting))


def model(setting: Setting) -> ModelConfig:
    """The model at its full depth."""
    return dataclasses.replace(setting.size.cfg, num_layers=setting.size.whole_layers)


def rows(setting: Setting) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of the step, and of the pass that is compared with it."""
    canonical, step = setting.size.compared
    return (step,), (canonical,)
