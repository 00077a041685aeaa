"""The table of operations: what holds is ticked, and what depends on the batch is named."""

import dataclasses

import numpy as np
import pytest

from detspec.doctor.operators import OperatorReport, examine_attention, examine_operators, rows_difference, slot_difference
from detspec.schedule import Numerics, Schedule
from tests.fakes import LAYER_CFGS, RANDOM_CFG

X = np.random.default_rng(0).standard_normal((256, 8), np.float32)
ROWS = (1, 8, 32)
REFERENCE = Schedule(Numerics(page=16, linear="pinned"))


@pytest.mark.slow
@pytest.mark.programs(110)  # each operation among several numbers of rows
def test_operations_of_a_canonical_pass_hold_and_attention_in_parts_does_not():
    cfg = dataclasses.replace(LAYER_CFGS["shared experts"], dtype="float32")
    report = examine_operators(cfg, schedule=REFERENCE, rows=ROWS)
    canonical = [operator for operator in report.operators if operator.canonical]
    names = {operator.name for operator in canonical}
    assert {operator.name for operator in report.operators} == names > {"router", "experts"}
    assert all(operator.holds and not operator.rows for operator in canonical), report.table()
    assert report.holds
    (cut,) = [operator for operator in report.operators if "parts" in operator.how]
    assert cut.rows.startswith("query ")  # where it is cut follows the longest sequence of a pass
    line = next(line for line in report.table().splitlines() if cut.how in line)
    assert line.split(cut.how)[1].split()[0] == "NO"


def test_canonical_attention_that_is_cut_in_parts_does_not_hold():
    numerics = dataclasses.replace(REFERENCE.numerics, num_splits=4)
    attention = examine_attention(RANDOM_CFG, numerics, how="in parts", canonical=True)
    assert attention.slot.startswith("query ")  # a neighbour that is further along decides where it is cut
    report = OperatorReport({}, ROWS, (attention,))
    assert not report.holds
    assert report.table().endswith("DO NOT HOLD, not even at a fixed number of rows")


def test_rows_that_know_how_many_they_are_or_where_they_stand_are_named():
    assert rows_difference(lambda x: x + len(x), X, (1, 256)) == "row 0 among 1 rows and 256"
    assert slot_difference(lambda x: x + len(x), X) == ""
    assert slot_difference(lambda x: x + np.arange(len(x))[:, None], X) == "row 255 in place 0"
    assert rows_difference(lambda x: x + np.arange(len(x))[:, None], X, (1, 256)) == ""
    assert slot_difference(lambda x: x + np.roll(x, 1, axis=0), X).startswith("row ")
    assert slot_difference(lambda x: 2 * x, X) == rows_difference(lambda x: 2 * x, X, (1, 256)) == ""
