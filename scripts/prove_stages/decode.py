"""Decode attention against a copy of as many bytes."""

from collections.abc import Iterator
from functools import partial

from kernel_shapes import AttentionShape

from prove_stages.ceilings import copying
from prove_stages.journal import Entry
from prove_stages.paged import attention_program, of_model, schedule_of
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import in_turns, ratio, typical

LEAST_OF_COPY = 0.8


def programs(setting: Setting) -> Iterator[Program]:
    """Attention and copy of each shape."""
    for shape in shapes(setting):
        yield from contest(setting, shape)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Measures each shape."""
    for shape in shapes(setting):
        yield Measurement(shape.name, partial(measure, setting, shape))


def measure(setting: Setting, shape: AttentionShape) -> Iterator[Entry]:
    """Time and bandwidth of one shape."""
    attention, copy = contest(setting, shape)
    samples = in_turns({"attention": attention.call(), "copy": copy.call()}, setting.size)
    seconds = typical(samples, "attention")
    least = setting.predicted(attention.work, 1e6)
    note = f"{attention.work.bytes / seconds / 1e12:.2f} TB/s"
    yield Entry(shape.name, 1e6 * seconds, "us", bound="bandwidth", note=note, predicted=least)
    yield Entry(
        f"{shape.name}, of a copy",
        ratio(samples, "copy", "attention"),
        "",
        setting.bar(LEAST_OF_COPY),
        bound="bandwidth",
        predicted=setting.predicted_ratio(copy.work, attention.work),
    )


def contest(setting: Setting, shape: AttentionShape) -> tuple[Program, Program]:
    """The attention, and a copy that reads and writes as many bytes as it reads."""
    attention = attention_program(shape, schedule_of(shape, setting))
    return attention, copying(f"copy for {shape.name}", int(attention.work.bytes) // 2)


def shapes(setting: Setting) -> list[AttentionShape]:
    """Shapes of one token of each sequence."""
    cfg = setting.size.cfg
    return [of_model(cfg, f"decode {rows} x {max_len}", rows, 1, max_len, decode=True) for rows, max_len in setting.size.decode]
