"""The picture of a comparison: rows up to and after the fork, zero as zero, and which points of very many are drawn."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from detspec.errors import InputError
from detspec.jobs.comparison import ComparedText, Comparison, Fork
from detspec.traces.draw_comparison import comparison_figure, kept_points
from detspec.viz.colours import CHANGED, SAME
from detspec.viz.forks import GAP, MOST_BARS


def text(num_tokens: int, fork: int | None, differences: list[float]) -> ComparedText:
    values = np.asarray(differences)
    found = None if fork is None else Fork(fork, (1, 2), ("", ""))
    return ComparedText("a", (num_tokens, num_tokens - 1), found, values > 0, values)


COMPARED = Comparison(("", ""), (text(4, None, [0, 0, 0, 0]), text(6, 3, [0, 1e-6, 1e-3]), text(5, 1, [np.inf])), (), (), ())


def test_rows_are_cut_at_forks_and_the_earliest_fork_is_on_top():
    axes, _ = comparison_figure(COMPARED).axes
    bars = [(bar.get_y(), bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor())) for bar in axes.patches]
    half = 0.5 - GAP / 2
    assert [(pytest.approx(y + half), *rest) for y, *rest in bars] == [
        *((0, 0, 1, SAME), (1, 0, 3, SAME), (2, 0, 4, SAME)),
        *((0, 1, 4, CHANGED), (1, 3, 3, CHANGED), (2, 4, 0, CHANGED)),
    ]
    assert axes.get_title(loc="left") == "2 of 3 texts fork"


def test_many_rows_are_drawn_as_areas_of_the_same_edges():
    many = (*COMPARED.texts, *(text(7, None, [0]) for _ in range(MOST_BARS)))
    axes, _ = comparison_figure(Comparison(("", ""), many, (), (), ())).axes
    same, changed = axes.patches
    assert list(same.get_data().values[:3]) == [1, 3, 4]
    assert list(changed.get_data().values[:3]) == [5, 6, 4]
    assert list(changed.get_data().baseline[:3]) == [1, 3, 4]
    assert (to_hex(same.get_facecolor()), to_hex(changed.get_facecolor())) == (SAME, CHANGED)


def test_points_show_zero_as_zero_and_what_is_no_number_above_all_others():
    _, axes = comparison_figure(COMPARED).axes
    same, other = (points.get_offsets().tolist() for points in axes.collections)
    assert sorted(same) == [[0, 0], [0, 0], [1, 0], [2, 0], [3, 0]]
    assert sorted(other) == [[0, pytest.approx(1e-2)], [1, 1e-6], [2, 1e-3]]
    assert axes.get_yscale() == "symlog"
    low, high = axes.get_ylim()
    assert low < 0
    assert high > 1e-2


def test_equal_outputs_are_drawn_too():
    _, axes = comparison_figure(Comparison(("", ""), (text(3, None, [0, 0, 0]),), (), (), ())).axes
    assert axes.get_title(loc="left") == "0 of 3 log-probabilities differ"


def test_of_many_points_the_largest_of_each_place_is_kept():
    places = np.repeat(np.arange(5), 20_000)
    values = np.zeros(100_000)
    values[[1, 30_001, 99_998]] = 1.0, 2.0, 3.0
    kept = kept_points(places, values)
    assert {1, 30_001, 99_998} <= set(kept.tolist())
    assert len(kept) <= 20_005


def test_outputs_without_a_common_request_have_no_picture():
    with pytest.raises(InputError, match="no request in common"):
        comparison_figure(Comparison(("", ""), (), (), ("a",), ("b",)))
