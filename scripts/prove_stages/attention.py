"""Canonical attention and prefill over pages, by themselves; `vendor.py` compares them."""

from collections.abc import Iterator
from functools import partial

from kernel_shapes import AttentionShape

from prove_stages.journal import Entry
from prove_stages.paged import attention_program, of_model, schedule_of
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import in_turns, typical


def programs(setting: Setting) -> Iterator[Program]:
    """Each shape."""
    for shape in shapes(setting):
        yield ours(setting, shape)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Measures each shape."""
    for shape in shapes(setting):
        yield Measurement(shape.name, partial(measure, setting, shape))


def measure(setting: Setting, shape: AttentionShape) -> Iterator[Entry]:
    """Time and rate of one shape."""
    program = ours(setting, shape)
    seconds = typical(in_turns({shape.name: program.call()}, setting.size), shape.name)
    note = f"{program.work.flop / seconds / 1e12:.0f} TFLOP/s, {program.work.bytes / seconds / 1e12:.2f} TB/s"
    least = setting.predicted(program.work, 1e6)
    yield Entry(shape.name, 1e6 * seconds, "us", bound=setting.bound(program.work), note=note, predicted=least)


def shapes(setting: Setting) -> list[AttentionShape]:
    """Canonical passes at the end of the context, and a whole prompt."""
    size = setting.size
    passes = [of_model(size.cfg, f"canonical {g}x{w} at {size.context}", g, w, size.context) for g, w in size.canonical]
    return [*passes, of_model(size.cfg, f"prefill 1x{size.prefill}", 1, size.prefill, size.prefill)]


def ours(setting: Setting, shape: AttentionShape) -> Program:
    """The kernel over pages."""
    return attention_program(shape, schedule_of(shape, setting))
