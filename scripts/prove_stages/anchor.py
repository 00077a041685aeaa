"""The anchor's bits in another process, compared with those that the doctor's process found."""

from collections.abc import Iterator

from detspec.bench.bench import random_model
from detspec.doctor.examination import examine_budgets
from prove_stages.examine import digest, pass_program, schedule_of
from prove_stages.journal import Entry
from prove_stages.programs import Measurement, Program, Setting


def programs(setting: Setting) -> Iterator[Program]:
    """One pass."""
    yield pass_program(setting, schedule_of(setting), calls=1)


def measurements(setting: Setting) -> Iterator[Measurement]:
    """One."""
    yield Measurement("bits of the anchor", lambda: compare(setting))


def compare(setting: Setting) -> Iterator[Entry]:
    """Whether the bits are equal; the other process may have chosen other products when it tuned itself."""
    cfg = setting.size.examined
    anchor, _ = examine_budgets(random_model(cfg), schedule_of(setting), [])
    own = digest(anchor)
    other = setting.earlier.get("doctor", {}).get("bits of the anchor", {}).get("note", "")
    yield Entry(
        "bits as in the doctor's process", float(own == other), "yes or no", 1.0, note=f"{own}, there {other or 'none'}"
    )
