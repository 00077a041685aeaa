"""The shipped model that thinks answers the demonstration's question, with its thoughts, in the same bits among others."""

import dataclasses
import importlib.resources
from pathlib import Path

import pytest

import detspec as ds
from detspec.checkpoint.folder import find_folder
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.cli.commands import main
from detspec.demo.thinking_demo import OTHERS, ThinkingReport, other_prompts, run_thinking_demo
from detspec.errors import InputError
from detspec.train.problems.words import word_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report() -> ThinkingReport:
    return run_thinking_demo(ds.load("thinking_parity"))


def test_question_is_answered_by_way_of_both_flips(report: ThinkingReport):
    assert report.chunks == ("A coin's state is heads.", "Alice flips, then Bob flips. What", "'s the state? A:")
    assert report.thoughts == ("", "tails heads")
    assert report.answer == "heads"
    assert (report.rounds, report.equal, report.num_others) == (2, True, 3)


def test_other_requests_are_other_questions_or_ends_of_a_question_in_other_words(tmp_path: Path):
    model = ds.load("thinking_parity")
    assert [model.decode(other) for other in other_prompts(model, [2, 3])] == list(OTHERS)
    word_tokenizer(["zebra"]).save(str(tmp_path / "tokenizer.json"))
    stranger = dataclasses.replace(model, tokenizer=Tokenizer(tmp_path / "tokenizer.json"))
    assert other_prompts(stranger, [5, 6, 7, 8]) == [[8], [7, 8], [6, 7, 8]]


def test_table_shows_what_was_read_and_thought(report: ThinkingReport):
    lines = report.table().splitlines()
    assert [line.split("   ")[-1].strip() for line in lines[1:4]] == ["-", "tails heads", "'s the state? A:"]
    assert "answer: heads" in lines
    assert "OTHER BITS" not in report.table()


def test_command_prints_it_and_refuses_words_it_does_not_know(capsys):
    assert main(["demo", "--thinking"]) == 0
    assert "answer: heads" in capsys.readouterr().out
    assert main(["demo", "--thinking", "A zebra's state is heads. What's the state?"]) == 2
    assert "zebra" in capsys.readouterr().err


def test_model_that_does_not_think_is_refused():
    with pytest.raises(InputError, match="no thinker and no compressor"):
        run_thinking_demo(ds.load())


def test_question_longer_than_the_model_reads_is_refused():
    flips = ", then".join([" Bob flips"] * 400)
    with pytest.raises(
        InputError, match=r"question has 1\d\d\d tokens; with . for the answer that is more than .* 1024 positions"
    ):
        run_thinking_demo(ds.load("thinking_parity"), f"A coin's state is heads.{flips}. What's the state?")


def test_shipped_models_are_small_and_found_by_name(tmp_path: Path, monkeypatch):
    folder = find_folder("thinking_parity")
    assert folder == Path(str(importlib.resources.files("detspec"))) / "assets" / "thinking_parity"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 3 * 2**20
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thinking_parity").mkdir()
    assert find_folder("thinking_parity") == Path("thinking_parity")  # a folder of one's own comes first
    with pytest.raises(InputError, match="no such folder"):
        ds.load("thinking_maze")
