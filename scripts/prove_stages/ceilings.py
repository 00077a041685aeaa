"""Measures the device at its best: a large copy, a large product, and how long it takes to start a program."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from detspec.roofline import Work
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting
from prove_stages.timing import in_turns, typical

LAUNCH_US = 10.0  # a guess: what the host takes to start a program from Python


def programs(setting: Setting) -> Iterator[Program]:
    """The copy, the product, and next to nothing."""
    size = setting.size
    yield copying("copy", size.copy_bytes)
    product = partial(jnp.matmul, preferred_element_type=jnp.float32)
    work = Work(bytes=8.0 * size.side**2, flop=2.0 * size.side**3)
    yield Program(
        "product", product, lambda: (random((size.side, size.side)), random((size.side, size.side), 1)), work=work, calls=50
    )
    yield Program("dispatch", lambda x: x + 1, lambda: (jnp.zeros(8, jnp.float32),), calls=1000)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Measures each program."""
    for program in programs(setting):
        yield Measurement(program.name, partial(measure, setting, program))


def measure(setting: Setting, program: Program) -> Iterator[Entry]:
    """The rate of one program; the data sheet predicts those of the copy and the product."""
    seconds = typical(in_turns({program.name: program.call()}, setting.size), program.name)
    sheet = setting.target
    if program.name == "copy":
        peak = None if sheet is None else sheet.bytes_per_s / 1e12
        rate = program.work.bytes / seconds / 1e12
        yield Entry("copy", rate, "TB/s", bound="bandwidth", note="read and written", predicted=peak)
    elif program.name == "product":
        peak = None if sheet is None else sheet.flop_per_s / 1e12
        rate = program.work.flop / seconds / 1e12
        yield Entry("product", rate, "TFLOP/s", bound="arithmetic", note="bfloat16, random", predicted=peak)
    else:
        launch = None if sheet is None else LAUNCH_US
        note = "a program of one small addition, queued; the prediction is a guess"
        yield Entry("dispatch", 1e6 * seconds, "us", bound="host", note=note, predicted=launch)


def copying(name: str, num_bytes: int) -> Program:
    """A program that reads and writes `num_bytes` each."""
    work = Work(bytes=2.0 * num_bytes, flop=num_bytes / 4)
    return Program(name, lambda x: x + 1, lambda: (jnp.zeros(num_bytes // 4, jnp.float32),), work=work, calls=50)


def random(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    """Random bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
