"""Acceptance of drafts: counts worked out by hand, in a table and a heat map; test_record_windows.py has real counts."""

import pytest

from detspec.errors import InputError
from detspec.traces.acceptance import AcceptanceCell, AcceptanceTable, counted, measure_acceptance
from detspec.traces.draw_acceptance import acceptance_figure
from detspec.traces.windows import TraceWindow

ALL = TraceWindow(
    start=6, last_token="a", drafted=("b", "c", "d"), targets=("b", "c", "d", "e"), accepted=3, committed=("b", "c", "d", "e"),
    length_before=6, length_drafted=9, length_after=10,
)  # fmt: skip
ONE = TraceWindow(
    start=10, last_token="e", drafted=("f", "g", "h"), targets=("f", "x", "y", "z"), accepted=1, committed=("f", "x"),
    length_before=10, length_drafted=13, length_after=12,
)  # fmt: skip
NONE = TraceWindow(
    start=12, last_token="x", drafted=(), targets=("y",), accepted=0, committed=("y",),
    length_before=12, length_drafted=12, length_after=13,
)  # fmt: skip
CELLS = ((AcceptanceCell(2, 4, 3, 5), counted([ALL, ONE, NONE])), (counted([NONE]), counted([NONE])))
TABLE = AcceptanceTable("ngram", (2, 4), (0.0, 0.8), CELLS)


def test_counts_are_sums_over_windows():
    cell = counted([ALL, ONE, NONE])
    assert cell == AcceptanceCell(num_passes=3, num_drafted=6, num_accepted=4, num_committed=7)
    assert (cell.rate, cell.tokens_a_pass) == (4 / 6, 7 / 3)
    assert (counted([NONE]).rate, counted([NONE]).tokens_a_pass) == (None, 1.0)


def test_table_has_a_row_for_each_temperature_and_a_column_for_each_window():
    assert str(TABLE).splitlines() == [
        "drafts of ngram: accepted, and tokens a pass",
        "temperature        window 2        window 4",
        "0                75 %  2.50      67 %  2.33",
        "0.8                 -  1.00         -  1.00",
    ]


def test_heat_map_shows_each_cell_and_a_panel_for_each_table():
    figure = acceptance_figure(TABLE, TABLE)
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts] == [
            *("75 %", "2.5 tokens", "67 %", "2.3 tokens"),
            *("-", "1.0 tokens", "-", "1.0 tokens"),
        ]
        assert axes.get_title(loc="left") == "drafts by prompt lookup"
        (image,) = axes.images
        assert image.get_array().filled(-1).tolist() == [[0.75, 4 / 6], [-1, -1]]


def test_nothing_to_measure_or_to_draw_is_refused():
    with pytest.raises(InputError, match="at least one result"):
        acceptance_figure()
    for wrong in ({"prompts": []}, {"windows": ()}, {"temperatures": ()}):
        with pytest.raises(InputError, match="at least one prompt, one window and one temperature"):
            measure_acceptance(None, **{"prompts": [(1,)], **wrong})
