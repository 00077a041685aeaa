"""The demonstration's arithmetic, and one run of it in small."""

import dataclasses
import re

import pytest

from detspec.checkpoint.load import load
from detspec.cli.commands import main
from detspec.demo import demo
from detspec.demo.demo import Change, DemoReport, DemoRun, compare, demo_prompts
from detspec.engine.request import Completion
from detspec.riders.counters import Stats

pytestmark = pytest.mark.slow


def completion(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Completion:
    return Completion("0", (1,), tokens, logprobs, "text", "length", "d" * 64, Stats())


def test_compare_counts_texts_and_places_by_bit_pattern():
    """A text is as it was, one has another last log-probability, one is a token shorter and different from place 1 on."""
    first = [completion((1, 2), (-1.0, -2.0)), completion((3, 4), (-1.0, 0.0)), completion((5, 6, 7), (-1.0, -2.0, -3.0))]
    second = [completion((1, 2), (-1.0, -2.0)), completion((3, 4), (-1.0, -0.0)), completion((5, 8), (-1.0, -2.5))]
    assert compare(first, first) == Change(texts=0, logprobs=0, num_texts=3, num_logprobs=7)
    assert compare(first, second) == Change(texts=1, logprobs=1 + 2, num_texts=3, num_logprobs=7)


def report(*, ordinary_changes: bool, deterministic_changes: bool) -> DemoReport:
    a, b, c = ((completion(tokens, (-1.0, last)),) for tokens, last in (((1, 2), -2.0), ((1, 2), -2.5), ((1, 3), -2.0)))
    runs = [DemoRun("ordinary", "alone", a, 1.0), DemoRun("ordinary", "crowd", c if ordinary_changes else b, 1.0)]
    runs += [
        DemoRun("deterministic", "alone", a, 1.0),
        DemoRun("deterministic", "crowd", b if deterministic_changes else a, 1.0),
    ]
    return DemoReport(tuple(runs))


@pytest.mark.parametrize("ordinary_changes", [True, False])
@pytest.mark.parametrize("deterministic_changes", [True, False])
def test_report_holds_only_if_what_should_change_does_and_nothing_else(ordinary_changes, deterministic_changes):
    """An ordinary text must change, not a bit alone; no bit of deterministic ones may."""
    found = report(ordinary_changes=ordinary_changes, deterministic_changes=deterministic_changes)
    assert found.control_found is ordinary_changes
    assert found.held is not deterministic_changes


def test_demo_prompts_are_sixteen_different_texts():
    assert len(set(demo_prompts())) == 16


@pytest.fixture
def small(monkeypatch, folder):
    """Two short prompts."""
    monkeypatch.setattr(demo, "demo_prompts", lambda: ["def f(x):", "import os"])
    monkeypatch.setattr(demo, "NUM_SEEDS", 1)
    monkeypatch.setattr(demo, "DRAFTING_BATCH", 2)
    monkeypatch.setattr(demo, "NUM_TIMED", 1)
    monkeypatch.setattr(demo, "SHUFFLE_SEED", 3)  # smaller ones leave two where they are
    return load(folder)


def test_demo_prints_its_table_and_fails_if_the_control_finds_nothing(small, folder, monkeypatch, capsys):
    lines: list[str] = []
    stages: list[str] = []
    length = 64 - len("def f(x):")  # the length of the other tests' caches
    found = demo.run_demo(small, max_tokens=length, show=lines.append, progress=stages.append)
    shown = "\n".join(lines)
    assert len(stages) == demo.NUM_STAGES
    assert "Deterministic: 0 of 2 texts change when all run at once." in shown
    for label in ("all 2 at once", "all 2, shuffled", demo.DRAFTS):
        assert re.search(rf"{label} .* 0/2 +0/{2 * length}$", shown, flags=re.MULTILINE)
    assert [run.kind for run in found.runs] == ["ordinary"] * 3 + ["deterministic"] * 4
    assert found.held
    assert all(completion.stats.num_draft_tokens > 0 for completion in found.runs[-1].completions)

    for outcome, code, message in [
        (found, 0 if found.control_found else 1, ""),
        (report(ordinary_changes=False, deterministic_changes=False), 1, "inverse control"),
        (report(ordinary_changes=True, deterministic_changes=True), 1, "changed bits"),
    ]:
        monkeypatch.setattr(demo, "run_demo", lambda *args, outcome=outcome, **keywords: outcome)
        assert main(["demo", "--model", str(folder), "--no-compile-cache"]) == code
        assert message in capsys.readouterr().err


def test_demo_without_a_tokenizer_is_refused(small):
    with pytest.raises(Exception, match=r"no tokenizer\.json"):
        demo.run_demo(dataclasses.replace(small, tokenizer=None), show=print)
