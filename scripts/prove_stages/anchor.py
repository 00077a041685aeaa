"""The anchor's bits in one process and in another, neither of which finds what the other compiled and tuned."""

from collections.abc import Iterator
from functools import partial

from detspec.bench.bench import random_model
from detspec.doctor.examination import examine_budgets
from prove_stages.examine import digest, pass_program, schedule_of
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting

STAGE = "doctor again"
FIRST = "bits of one process"
OTHERS = ("doctor untuned", "doctor")  # stages whose processes found them, too


def programs(setting: Setting) -> Iterator[Program]:
    """One pass."""
    yield pass_program(setting, schedule_of(setting), calls=1)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """One for each process."""
    yield Measurement(FIRST, partial(find, setting), apart=True)
    yield Measurement("bits of another process", partial(compare, setting))


def find(setting: Setting) -> Iterator[Entry]:
    """The bits that this process finds."""
    yield Entry(FIRST, float(schedule_of(setting).budget.rows), "rows", note=bits_here(setting))


def compare(setting: Setting) -> Iterator[Entry]:
    """Whether they are those of the first process, and of processes that ran other stages, which may be tuned otherwise."""
    own = bits_here(setting)
    there = note_of(setting, STAGE, FIRST)
    yield Entry("bits as in the first process", float(own == there), "yes or no", 1.0, note=f"{own}, there {there or 'none'}")
    for stage in OTHERS:
        if there := note_of(setting, stage, "bits of the anchor"):
            yield Entry(f"bits as of {stage}", float(own == there), "yes or no", note=f"there {there}")


def bits_here(setting: Setting) -> str:
    """A digest of the anchor's bits."""
    anchor, _ = examine_budgets(random_model(setting.size.examined), schedule_of(setting), [])
    return digest(anchor)


def note_of(setting: Setting, stage: str, name: str) -> str:
    """The note of an earlier entry, "" if there is none."""
    return str(setting.earlier.get(stage, {}).get(name, {}).get("note", ""))
