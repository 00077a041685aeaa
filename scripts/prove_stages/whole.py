"""A step, a canonical step and a canonical pass of the model at its full depth."""

from collections.abc import Iterator

from detspec.config import ModelConfig
from detspec.model.dense import with_fields
from prove_stages.passes import measured_schedules, of_depth, pass_program
from prove_stages.programs import Measurement, Program, Setting


def programs(setting: Setting) -> Iterator[Program]:
    """Each of them."""
    for schedule in measured_schedules(setting, *rows(setting)):
        yield pass_program(setting, model(setting), schedule)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Measures each of them, and the ratios."""
    yield from of_depth(setting, model(setting), *rows(setting))


def model(setting: Setting) -> ModelConfig:
    """The model at its full depth."""
    return with_fields(setting.size.cfg, num_layers=setting.size.whole_layers)


def rows(setting: Setting) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of the steps, and of the pass that is compared with one."""
    canonical, step = setting.size.compared
    return (step,), (canonical,)
