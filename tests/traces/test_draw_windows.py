"""The trace picture, on the two worked examples of draft, verify and commit: one window without and one with a rollback."""

import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon

from detspec.errors import InputError
from detspec.traces.draw_windows import save_trace, shown_tokens, trace_figure
from detspec.traces.windows import Trace, TraceWindow, default_windows
from detspec.viz.colours import BLUE, GREEN, GREY, RED, YELLOW
from detspec.viz.shapes import printable

ROOT = Path(__file__).parents[2]
PROMPT = ("def", " fib", "(", "n", "):", "\n")

# T0 at position 6; all three drafts agree, T4 is the bonus.
NO_ROLLBACK = TraceWindow(
    start=6,
    last_token=" return",
    drafted=(" n", " if", " n"),
    targets=(" n", " if", " n", "<"),
    accepted=3,
    committed=(" n", " if", " n", "<"),
    length_before=6,
    length_drafted=9,
    length_after=10,
)

# T0 at position 10; T1 and T2 agree, T3 does not, T4 is void.
ROLLBACK = TraceWindow(
    start=10,
    last_token="<",
    drafted=("2", " else", " m"),
    targets=("2", " else", " $fib$", "("),
    accepted=2,
    committed=("2", " else", " $fib$"),
    length_before=10,
    length_drafted=13,
    length_after=13,
)

TRACE = Trace(PROMPT, (NO_ROLLBACK, ROLLBACK), num_others=7, title="a title")


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def blocks(figure: Figure, colour: str, hatched: bool = False) -> int:
    """How many token blocks of that look there are."""
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    return sum(to_hex(box.get_facecolor()) == colour and bool(box.get_hatch()) == hatched for box in boxes)


def slots(figure: Figure, colour: str) -> int:
    """How many slices of cylinders have that colour."""
    return sum(isinstance(patch, Polygon) and to_hex(patch.get_facecolor()) == colour for patch in figure.axes[0].patches)


def long_window(drafted: int, accepted: int) -> TraceWindow:
    drafts = tuple(f"d{i}" for i in range(1, drafted + 1))
    targets = (*drafts[:accepted], *(f"t{i}" for i in range(accepted + 1, drafted + 2)))
    return TraceWindow(6, "x", drafts, targets, accepted, targets[: accepted + 1], 6, 6 + drafted, 6 + accepted + 1)


def test_window_without_rollback_shows_four_stages_and_the_bonus():
    figure = trace_figure(TRACE, [0])
    shown = texts(figure)
    for stage in ("Prefill", "Decode", "Verify", "No Rollback"):
        assert shown.count(stage) == 1
    for cache, length in (("prefill", 6), ("decode", 9), ("verify", 10), ("accepting", 10)):
        assert shown[shown.index(f"KV cache after {cache}") + 1] == f"{length} slots"
    assert "No Rollback: sequence and KV after accepting all tokens (including T₄)" in shown
    for symbol in ("T₁'", "T₂'", "T₃'", "T₁ (=T₁')", "T₂ (=T₂')", "T₃ (=T₃')"):
        assert shown.count(symbol) == 1
    assert shown.count("T₀") == 4
    assert shown.count("T₄") == 2  # in verify and in the outcome
    assert shown.count("✓") == 3
    assert "✗" not in shown


def test_window_without_rollback_colours_every_token_and_slot():
    figure = trace_figure(TRACE, [0])
    assert blocks(figure, BLUE) == 5  # the prompt, and T0 in four columns
    assert blocks(figure, YELLOW) == 3
    assert blocks(figure, GREEN) == 6  # T1 T2 T3 in verify and in the outcome
    assert blocks(figure, GREEN, hatched=True) == 2  # T4 in both
    assert blocks(figure, RED) == 0
    assert blocks(figure, GREY) == 8  # four of the seven other requests, in prefill and decode
    assert slots(figure, BLUE) == 4
    assert slots(figure, YELLOW) == 3
    assert slots(figure, GREEN) == 8
    assert slots(figure, RED) == 0


def test_window_with_rollback_shows_what_was_cut():
    figure = trace_figure(TRACE, [1])
    shown = texts(figure)
    for stage in ("Prefill and 1 window", "Decode", "Verify", "Rollback"):
        assert shown.count(stage) == 1
    for cache, length in (("1 window", 10), ("decode", 13), ("verify", 14), ("verify-rollback", 13)):
        assert shown[shown.index(f"KV cache after {cache}") + 1] == f"{length} slots"
    assert "Rollback: sequence and KV cache restored until the last accepted token T₂ (length 14 → 13)" in shown
    assert "T₃ (≠T₃')" in shown
    assert shown.count("T₃") == 1  # the correction, in the outcome
    assert shown.count("T₄") == 1  # void, in verify only
    assert shown.count("✓") == 2
    assert shown.count("✗") == 2


def test_window_with_rollback_colours_every_token_and_slot():
    figure = trace_figure(TRACE, [1])
    assert blocks(figure, YELLOW) == 3
    assert blocks(figure, GREEN) == 4  # T1 T2 in verify and in the outcome
    assert blocks(figure, RED) == 2  # T3 T4 in verify
    assert blocks(figure, GREEN, hatched=True) == 1  # the correction
    assert slots(figure, GREEN) == 6  # T0 T1 T2 in verify and after the rollback
    assert slots(figure, RED) == 1  # T3'


def test_tokens_show_their_text_and_positions():
    shown = texts(trace_figure(TRACE, [1]))
    assert shown.count("·$fib$") == 2
    assert shown.count("·m") == 1
    assert "…urn·n·if·n" in shown  # the tail of "def fib(n):\n return n if n", which stands before T0
    for position, columns in ((10, 3), (13, 3), (14, 1)):
        assert shown.count(str(position)) == columns


def test_window_cut_by_a_stop_token_shows_only_what_was_committed():
    window = TraceWindow(6, "x", ("a", "b", "c"), ("a", "b", "c", "d"), 3, ("a", "b"), 6, 9, 8)
    figure = trace_figure(Trace(PROMPT, (window,), 0, ""))
    assert "No Rollback: the text ends with T₂" in texts(figure)
    assert blocks(figure, GREEN) == 3 + 2
    assert blocks(figure, GREY) == 0


def test_default_windows_are_the_first_of_each_kind():
    plain = TraceWindow(6, "x", (), ("a",), 0, ("a",), 6, 6, 7)
    assert default_windows(Trace(PROMPT, (plain, NO_ROLLBACK, NO_ROLLBACK, ROLLBACK, ROLLBACK), 0, "")) == (1, 3)
    assert default_windows(Trace(PROMPT, (ROLLBACK, NO_ROLLBACK), 0, "")) == (0, 1)
    assert default_windows(Trace(PROMPT, (NO_ROLLBACK,), 0, "")) == (0,)
    assert default_windows(Trace(PROMPT, (plain, plain), 0, "")) == (0,)
    assert texts(trace_figure(TRACE)).count("Verify") == 2


@pytest.mark.parametrize(("drafted", "accepted"), [(7, 4), (15, 15), (15, 0), (16, 3)])
def test_window_of_moderate_length_shows_every_token(drafted: int, accepted: int):
    assert shown_tokens(long_window(drafted, accepted)) == list(range(drafted + 2))


@pytest.mark.parametrize(("drafted", "accepted"), [(17, 9), (63, 0), (63, 40), (63, 63), (255, 100)])
def test_long_window_leaves_out_runs_but_not_the_turning_point(drafted: int, accepted: int):
    window = long_window(drafted, accepted)
    lines = shown_tokens(window)
    kept = [i for i in lines if i is not None]
    assert len(lines) <= 18
    assert kept == sorted(kept)
    assert {0, 1, accepted, accepted + 1, drafted + 1} <= set(kept)
    for before, at, after in zip(lines, lines[1:], lines[2:], strict=False):
        assert at is not None or (before is not None and after is not None and after - before > 1)
    assert "⋮" in texts(trace_figure(Trace(PROMPT, (window,), 0, "")))


@pytest.mark.slow
def test_save_trace_writes_a_deterministic_svg_and_a_png(tmp_path):
    written = save_trace(TRACE, tmp_path / "new" / "trace.v1")
    assert [path.name for path in written] == ["trace.v1.svg", "trace.v1.png"]
    svg, png = (path.read_bytes() for path in written)
    assert ET.fromstring(svg).tag.endswith("svg")
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert save_trace(TRACE, tmp_path / "again")[0].read_bytes() == svg
    other = save_trace(Trace(PROMPT, (NO_ROLLBACK, ROLLBACK), 6, "a title"), tmp_path / "other")
    assert other[0].read_bytes() != svg


def test_tokens_outside_the_font_are_escaped_without_warnings(tmp_path):
    window = TraceWindow(1, "中", ("🙂",), ("\x00", "\t"), 0, ("\x00",), 1, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_trace(Trace(("\u202e",), (window,), 0, "$a$"), tmp_path / "trace")
    assert printable("a b\n", 9) == "a·b⏎"
    assert printable("中", 9) == "\\u4e2d"
    assert printable("abcdef", 4) == "abc…"
    assert printable("abcdef", 4, tail=True) == "…def"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": ("2", " else")}, "one target more"),
        ({"accepted": 4}, "between 0 and 3"),
        ({"committed": ("2", " else", " fib", "(")}, r"1 to accepted \+ 1 = 3"),
        ({"committed": ()}, r"1 to accepted \+ 1 = 3"),
    ],
)
def test_window_that_contradicts_itself_is_refused(change: dict, message: str):
    with pytest.raises(InputError, match=message):
        TraceWindow(**(vars(ROLLBACK) | change))


def test_missing_windows_are_refused():
    with pytest.raises(InputError, match="0 to 1, asked for 2"):
        trace_figure(TRACE, [2])
    with pytest.raises(InputError, match="no window"):
        trace_figure(Trace(PROMPT, (), 0, ""))


def test_missing_matplotlib_is_refused_with_the_command_that_installs_it():
    """Recording needs no matplotlib."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import detspec as ds\n"
        "print(ds.traces.run_trace.__name__)\n"
        "try: ds.traces.save_trace\n"
        "except ds.InputError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "run_trace\npictures need matplotlib: pip install 'matplotlib>=3.9'\n"
