"""The options of `detspec trace --thoughts`; traces themselves are tested in tests/evals, pictures in tests/viz."""

import dataclasses
from pathlib import Path

import pytest

from detspec.checkpoint.native import save_native
from detspec.cli import main
from detspec.cli.trace import THINKING_PROMPT, thought_lines
from detspec.config import ThinkingConfig
from detspec.model.params import with_thinking
from detspec.train.problems.parity import Parity
from detspec.train.problems.words import split
from detspec.viz.thought_trace import Thought, ThoughtPass, ThoughtTrace
from tests.engine.byte_model import BYTE_CFG, byte_params

NOTHING, SAID = Thought(), Thought(("tails", " heads"), ended=False)


@pytest.fixture(scope="module")
def thinking_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte model with an untrained thinker and compressor."""
    cfg = dataclasses.replace(BYTE_CFG, num_layers=1)
    thinking = ThinkingConfig(chunk=8, in_layer=0, out_layer=1, max_thought=3, end_id=0)
    path = tmp_path_factory.mktemp("thinking") / "model"
    return save_native(path, *with_thinking(cfg, byte_params(), thinking), side_files_from=folder).result()


def test_trace_thoughts_prints_a_table_and_draws(thinking_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "thoughts"
    options = ["--prompt", "a coin is tossed twice", "--max-tokens", "4", "--out", str(out), "--no-compile-cache"]
    assert main(["trace", "--thoughts", "--model", str(thinking_folder), *options]) == 0
    title, *lines, svg, png = capsys.readouterr().out.splitlines()
    assert "all thoughts guessed trivial" in title
    assert "read 2, length 16" in "".join(line for line in lines if line.startswith("  pass"))
    assert [line[2:10] for line in lines if line.startswith("  chunk")] == ["chunk  0", "chunk  1", "chunk  2"]
    assert (svg, png) == (f"{out}.svg", f"{out}.png")
    assert Path(svg).exists()
    assert Path(png).exists()


def test_thought_lines_are_one_for_each_pass_thought_and_the_answer():
    passes = (ThoughtPass(0, (NOTHING, NOTHING), 1, (NOTHING, SAID), read=2, length=4),)
    trace = ThoughtTrace((("A", "coin"), ("Al", " flips"), ("?",)), passes, ("heads",), 2, (1, 2, 2), "")
    assert thought_lines(trace) == [
        "pass  1: chunks  0 to  1, 1 of 2 guesses accepted, 1 corrected; read 2, length 4",
        "chunk  0: A coin   -> nothing",
        "chunk  1: Al flips -> tails heads (cut)",
        "chunk  2: ?        => heads",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "no thinker and no compressor"), (["--model", "/nowhere"], "no such folder")],
)
def test_trace_thoughts_refuses_in_one_line(folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["trace", "--thoughts", "--model", str(folder), "--no-compile-cache", *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_default_prompt_holds_words_of_the_problems_alone():
    assert set(split(THINKING_PROMPT)) <= set(Parity().words())
