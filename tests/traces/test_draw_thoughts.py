"""The picture of a prompt read with thoughts, on the worked example of `detspec.traces.thoughts` and on long prompts."""

import dataclasses
import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

from detspec.errors import InputError
from detspec.traces.draw_rounds import MAX_COLUMNS, MAX_LINES, shown_passes
from detspec.traces.draw_thoughts import Chip, chip_lines, line_width, save_thoughts, thought_figure
from detspec.traces.thoughts import ThoughtPass, ThoughtText, ThoughtTrace
from detspec.viz.colours import BROWN, GREEN, RED, YELLOW
from detspec.viz.shapes import shown_places

NOTHING, A, B = ThoughtText(), ThoughtText(("a",)), ThoughtText(("b", "bb"))
WORDY = ThoughtText(("incomprehensible",) * 20)
CHUNKS = (*(tuple(f"w{i}{j}" for j in range(4)) for i in range(5)), ("Q", ":"))

# All drafts trivial; chunks 1 and 3 are thought about.
TRACE = ThoughtTrace(
    chunks=CHUNKS,
    passes=(
        ThoughtPass(0, (NOTHING,) * 5, 1, (NOTHING, A), length=8),
        ThoughtPass(2, (NOTHING,) * 3, 1, (NOTHING, B), length=16),
        ThoughtPass(4, (NOTHING,), 1, (NOTHING,), length=20),
    ),
    answer=("heads",),
    chunk=4,
    layers=(1, 3, 4),
    title="a $title$",
)

SMALL = ThoughtTrace(CHUNKS[:2], (ThoughtPass(0, (NOTHING,), 0, (A,), 4),), ("x",), 4, (2, 30, 32), "t" * 150)


def long_trace(number: int, draft: ThoughtText = NOTHING) -> ThoughtTrace:
    """`number` chunks of which every third one is thought about; passes of at most 8 chunks whose drafts are all `draft`."""
    thoughts = tuple(A if i % 3 == 1 else NOTHING for i in range(number - 1))
    passes, first = [], 0
    while first < len(thoughts):
        ahead = thoughts[first : first + 8]
        accepted = next((i for i, thought in enumerate(ahead) if thought != draft), len(ahead))
        committed = ahead[: accepted + 1]
        read = first + len(committed)
        passes.append(ThoughtPass(first, (draft,) * len(ahead), accepted, committed, 4 * read))
        first = read
    return ThoughtTrace((*[CHUNKS[0]] * (number - 1), ("Q",)), tuple(passes), ("x",) * 40, 4, (1, 3, 4), "")


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def blocks(figure: Figure, colour: str, hatched: bool = False) -> int:
    """How many boxes of that look there are."""
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    return sum(to_hex(box.get_facecolor()) == colour and bool(box.get_hatch()) == hatched for box in boxes)


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that stand on each other, and texts that leave the picture."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    page = figure.bbox
    shown: list[Text] = [text for text in figure.axes[0].texts if text.get_text()]
    places = [(text.get_text(), text.get_window_extent(renderer).padded(-1.5)) for text in shown]
    found = [(a, b) for i, (a, p) in enumerate(places) for b, q in places[i + 1 :] if p.overlaps(q)]
    return found + [(text, "edge") for text, p in places if p.x0 < 0 or p.y0 < 0 or p.x1 > page.x1 or p.y1 > page.y1]


def drawn(trace: ThoughtTrace) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = thought_figure(trace)
    FigureCanvasAgg(figure)
    return figure


def test_figure_shows_chunks_states_thoughts_and_the_answer():
    figure = thought_figure(TRACE)
    shown = texts(figure)
    assert all(shown.count(token) == 1 for chunk in CHUNKS for token in chunk)
    assert [shown.count(f"chunk {i}") for i in range(5)] == [1] * 5
    assert shown.count("chunk 5 (the last)") == 1
    assert shown.count("positions 16 to 19") == 1
    assert shown.count("T") == shown.count("C") == 5
    assert shown.count("heads") == 3  # at the top, after the prompt, and in the last line
    assert "20 slots" in shown
    assert {"after layer 1", "after layer 3", "layers 2 to 3", "layers 2 to 4"} <= set(shown)


def test_figure_shows_states_of_trivial_thoughts_as_zero():
    shown = texts(thought_figure(TRACE))
    assert shown.count("S₂") == shown.count("S₄") == 1
    assert blocks(thought_figure(TRACE), BROWN) == 2
    # Next to the chunk, and once in every pass that read it with 0.
    assert [shown.count(f"S{i} = 0") for i in "₀₁₂₃₄₅"] == [2, 2, 1, 3, 2, 2]


def test_figure_marks_what_each_pass_accepted_refused_and_voided():
    figure = thought_figure(TRACE)
    shown = texts(figure)
    assert shown.count("✓") == 1 + 1 + 1
    assert shown.count("✗") == 1 + 1
    assert shown.count("void") == 3 + 1 + 1  # the last is the legend's
    assert blocks(figure, YELLOW) == 5 + 3 + 1
    assert blocks(figure, GREEN) == 3
    assert blocks(figure, GREEN, hatched=True) == 2
    assert blocks(figure, RED) == 3 + 1
    for read, length in ((2, 8), (4, 16), (5, 20)):
        assert shown[shown.index(f"read {read}") + 1] == f"length {length}"
    assert "1 of 5 accepted, 1 corrected" in shown
    assert "1 of 1 accepted" in shown
    assert "3 passes" in shown


def test_figure_says_which_state_each_chunk_was_given():
    """Pass 2 goes on from the thought that pass 1 committed, and a draft that is not trivial gives its own state."""
    assert texts(thought_figure(TRACE)).count("S₂ = C(Z₁)") == 1
    drafted = dataclasses.replace(
        TRACE,
        passes=(
            ThoughtPass(0, (NOTHING, A, NOTHING, A, A), 3, (NOTHING, A, NOTHING, B), length=16),
            ThoughtPass(4, (A,), 0, (NOTHING,), length=20),
        ),
    )
    shown = texts(thought_figure(drafted))
    assert shown.count("S₂ = C(Z₁')") == 1
    assert shown.count("S₄ = C(Z₃')") == 1
    assert shown.count("S₄ = C(Z₃)") == 1
    assert blocks(thought_figure(drafted), RED) == 1


def test_thought_without_an_end_is_drawn_without():
    unended = dataclasses.replace(TRACE.passes[0], thoughts=(NOTHING, ThoughtText(("a",), ended=False)))
    cut = dataclasses.replace(TRACE, passes=(unended, *TRACE.passes[1:]))
    assert texts(thought_figure(TRACE)).count("<end>") - texts(thought_figure(cut)).count("<end>") == 1


@pytest.mark.parametrize(
    "trace",
    [
        TRACE,
        long_trace(8),
        long_trace(40),
        long_trace(130, draft=B),
        dataclasses.replace(TRACE, chunk=64, chunks=(*[("a long token",) * 64] * 5, ("\n 中 ",)), answer=()),
        dataclasses.replace(TRACE, passes=(ThoughtPass(0, (WORDY,) * 5, 5, (WORDY,) * 5, 20),), layers=(0, 1, 1)),
        SMALL,
    ],
    ids=["example", "eight", "forty", "wrong", "wide", "wordy", "two"],
)
def test_no_text_stands_on_another_or_leaves_the_picture(trace: ThoughtTrace):
    assert overlaps(drawn(trace)) == []


def test_overlaps_would_be_seen():
    figure = drawn(TRACE)
    figure.axes[0].text(0.5, 0.33, "intruder", size=9)
    assert ("a $title$", "intruder") in overlaps(figure)


def test_long_prompt_leaves_out_a_run_of_chunks_and_says_which():
    shown = texts(thought_figure(long_trace(20)))
    assert [text for text in shown if re.fullmatch(r"chunk \d+.*", text)] == [
        *("chunk 0", "chunk 1", "chunk 2", "chunk 3", "chunk 18", "chunk 19 (the last)"),
        "chunk 19, then decoding",
    ]
    assert any("Chunks 4 to 17 are left out" in text for text in shown)
    assert any(re.search(r"pass.* left out", text) for text in shown)
    assert shown.count("x") == 2 * 11  # of the answer's 40 tokens its beginning, at the top and after the prompt


@pytest.mark.parametrize(
    ("number", "most", "expected"),
    [(7, 7, [0, 1, 2, 3, 4, 5, 6]), (8, 7, [0, 1, 2, 3, None, 6, 7]), (30, 9, [0, 1, 2, 3, 4, None, 27, 28, 29]), (0, 9, [])],
)
def test_shown_places_keep_both_ends(number: int, most: int, expected: list[int | None]):
    assert shown_places(number, most) == expected


def test_shown_passes_are_those_that_read_a_drawn_chunk():
    trace = long_trace(40)
    chunks = [chunk for chunk in shown_places(40, MAX_COLUMNS) if chunk is not None]
    lines = shown_passes(trace, chunks)
    kept = [number for number in lines if number is not None]
    assert None in lines
    assert kept[0] == 0
    assert kept[-1] == len(trace.passes) - 1
    reading = [i for i, one in enumerate(trace.passes) if set(chunks) & set(range(one.first, one.end))]
    assert kept == reading
    assert len(shown_passes(long_trace(130, draft=B), range(130))) == MAX_LINES
    assert shown_passes(TRACE, range(6)) == [0, 1, 2]


def test_chip_lines_hold_all_tokens_within_the_width():
    chips = [Chip("x" * (1 + i % 9)) for i in range(30)]
    lines = chip_lines(chips, 1.2)
    assert [chip for line in lines for chip in line] == chips
    assert all(line_width(line) <= 1.2 for line in lines)
    assert all(line_width([*line, after[0]]) > 1.2 for line, after in itertools.pairwise(lines))


def test_save_thoughts_writes_a_deterministic_svg_and_a_png(tmp_path):
    svg, png = save_thoughts(SMALL, tmp_path / "new" / "thoughts")
    assert (svg.name, png.name) == ("thoughts.svg", "thoughts.png")
    assert ET.fromstring(svg.read_bytes()).tag.endswith("svg")
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert save_thoughts(SMALL, tmp_path / "again")[0].read_bytes() == svg.read_bytes()
    other = save_thoughts(dataclasses.replace(SMALL, answer=("tails",)), tmp_path / "other")
    assert other[0].read_bytes() != svg.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": 6}, r"between 0 and 5 \(drafts\), got 6"),
        ({"accepted": 2}, "accepts 2 of 5 drafts commits 3 thoughts, got 2"),
    ],
)
def test_pass_that_contradicts_itself_is_refused(change: dict, message: str):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TRACE.passes[0], **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": CHUNKS[:1]}, "got 1 chunks"),
        ({"chunks": CHUNKS[:5]}, "chunks 0 to 4 does not go on from chunk 0 up to chunk 3 at most"),
        ({"passes": TRACE.passes[1:]}, "chunks 2 to 4 does not go on from chunk 0"),
        ({"passes": TRACE.passes[:2]}, "commit 4 thoughts, and 5 chunks"),
    ],
)
def test_trace_that_contradicts_itself_is_refused(change: dict, message: str):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TRACE, **change)
