"""`detspec trace --thoughts`: options and what it prints; traces are tested in tests/traces."""

from pathlib import Path

import pytest

from detspec.checkpoint.load import Model
from detspec.cli import main
from detspec.cli.trace import THINKING_PROMPT, thought_lines
from detspec.sampling_params import SamplingParams
from detspec.traces import record_thoughts
from detspec.traces.thoughts import ThoughtPass, ThoughtText, ThoughtTrace
from detspec.train.problems.tasks import Parity
from detspec.train.problems.words import split
from tests.engine.byte_model import BYTE_CFG

NOTHING, SAID = ThoughtText(), ThoughtText(("tails", " heads"), ended=False)
TRACE = ThoughtTrace(
    chunks=(("A", "coin"), ("Al", " flips"), ("?",)),
    passes=(ThoughtPass(0, (NOTHING, NOTHING), 1, (NOTHING, SAID), length=4),),
    answer=("heads",),
    chunk=2,
    layers=(1, 2, 2),
    title="a title",
)
LINES = [
    "pass  1: chunks  0 to  1, 1 of 2 drafts accepted, 1 corrected; read 2, length 4",
    "chunk  0: A coin   -> nothing",
    "chunk  1: Al flips -> tails heads (cut)",
    "chunk  2: ?        => heads",
]


def test_thought_lines_are_one_for_each_pass_thought_and_the_answer():
    assert thought_lines(TRACE) == LINES


def test_trace_thoughts_prints_a_table_and_draws(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The recorded trace is made up: recording compiles for long, and is tested elsewhere."""
    asked = []

    def record(model: Model, prompt: str, sampling: SamplingParams, *, think: str) -> ThoughtTrace:
        asked.append((model.cfg, prompt, sampling, think))
        return TRACE

    monkeypatch.setattr(record_thoughts, "run_thought_trace", record)
    out = tmp_path / "thoughts"
    options = ["--max-tokens", "4", "--draft-thoughts", "self", "--out", str(out), "--no-compile-cache"]
    assert main(["trace", "--thoughts", "--model", str(folder), *options]) == 0
    assert asked == [(BYTE_CFG, THINKING_PROMPT, SamplingParams(max_tokens=4), "self")]
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["a title", *(f"  {line}" for line in LINES), f"{out}.svg", f"{out}.png"]
    assert Path(f"{out}.svg").exists()
    assert Path(f"{out}.png").exists()


@pytest.mark.parametrize(
    ("options", "message"), [([], "no thinker and no compressor"), (["--model", "/nowhere"], "no such folder")]
)
def test_trace_thoughts_refuses_in_one_line(folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["trace", "--thoughts", "--model", str(folder), "--no-compile-cache", *options]) == 2
    shown = capsys.readouterr()
    *_, last = shown.err.splitlines()
    assert message in last
    assert shown.out == ""


def test_default_prompt_holds_words_of_the_problems_alone():
    assert set(split(THINKING_PROMPT)) <= set(Parity().words())
