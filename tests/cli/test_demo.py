"""The demonstration's arithmetic, and one run of it in small."""

import dataclasses

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
    a, b = (completion((1, 2), (-1.0, -2.0)),), (completion((1, 2), (-1.0, -2.5)),)
    runs = []
    for kind, changes in (("ordinary", ordinary_changes), ("deterministic", deterministic_changes)):
        runs += [DemoRun(kind, 0.0, 1, "batch 1", a, 1.0), DemoRun(kind, 0.0, 5, "batch 5", b if changes else a, 1.0)]
    return DemoReport(("x",), tuple(runs), ())


@pytest.mark.parametrize("ordinary_changes", [True, False])
@pytest.mark.parametrize("deterministic_changes", [True, False])
def test_report_holds_only_if_what_should_change_does_and_nothing_else(ordinary_changes, deterministic_changes):
    found = report(ordinary_changes=ordinary_changes, deterministic_changes=deterministic_changes)
    assert found.control_found is ordinary_changes
    assert found.held is not deterministic_changes


def test_demo_prompts_are_sixteen_different_texts():
    assert len(set(demo_prompts())) == 16


@pytest.fixture
def small(monkeypatch, folder):
    """Two short prompts in batches of one and two."""
    monkeypatch.setattr(demo, "demo_prompts", lambda: ["def f(x):", "import os"])
    monkeypatch.setattr(demo, "BATCHES", (1, 2))
    monkeypatch.setattr(demo, "DRAFTING_BATCH", 2)
    monkeypatch.setattr(demo, "SHUFFLE_SEED", 3)  # smaller ones leave two where they are
    return load(folder)


def test_demo_prints_its_table_and_fails_if_the_control_finds_nothing(small, folder, monkeypatch, tmp_path, capsys):
    lines: list[str] = []
    found = demo.run_demo(small, max_tokens=64 - len("def f(x):"), show=lines.append)  # the length of the other tests' caches
    table = "\n".join(lines)
    assert "deterministic" in lines[0]
    assert lines[1].startswith("  temperature 0, batch 1 ")
    assert found.held
    assert "temperature 0.8, batch 2, shuffled" in table
    assert "Self draft at temperature 0: " in table
    for kind in demo.KINDS:
        assert sum(run.kind == kind for run in found.runs) == {"ordinary": 14, "deterministic": 16}[kind]
    drafted = next(run for run in found.runs if "self draft" in run.label)
    assert all(completion.stats.num_draft_tokens > 0 for completion in drafted.completions)

    for outcome, code, message in [
        (found, 0 if found.control_found else 1, ""),
        (
            dataclasses.replace(found, runs=report(ordinary_changes=False, deterministic_changes=False).runs),
            1,
            "inverse control",
        ),
        (dataclasses.replace(found, runs=report(ordinary_changes=True, deterministic_changes=True).runs), 1, "changed bits"),
    ]:
        monkeypatch.setattr(demo, "run_demo", lambda *args, outcome=outcome, **keywords: outcome)
        monkeypatch.setattr("detspec.cli.demo.draw", lambda *args: "no picture")
        assert main(["demo", "--model", str(folder), "--no-compile-cache", "--out", str(tmp_path)]) == code
        shown = capsys.readouterr()
        assert "no picture" in shown.out
        assert message in shown.err


def test_demo_without_a_tokenizer_is_refused(small):
    with pytest.raises(Exception, match=r"no tokenizer\.json"):
        demo.run_demo(dataclasses.replace(small, tokenizer=None), show=print)
