"""`detspec eval` where the harness is not installed, and what it adds to the harness's arguments."""

import importlib.util

import pytest

from detspec.cli.commands import main, parse
from detspec.cli.eval import with_defaults

DEFAULTS = ["run", "--model", "detspec", "--batch_size", "auto", "--model_args", "pretrained=tiny_python"]


def test_missing_harness_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["eval", "--tasks", "hellaswag"]) == 2
    assert capsys.readouterr().err.endswith("which is not installed: pip install 'lm_eval<0.5,>=0.4.13'\n")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--tasks", "a"], [*DEFAULTS, "--tasks", "a"]),
        (["run", "--tasks", "a"], [*DEFAULTS, "--tasks", "a"]),
        (["--model_args", "max_len=9", "seed=1"], [*DEFAULTS, "--model_args", "max_len=9", "seed=1"]),
        (["-a", "max_len=9,path=x", "-b", "4"], ["run", "--model", "detspec", "-a", "max_len=9,path=x", "-b", "4"]),
        (["--model", "hf", "--model_args", "pretrained=x"], ["run", "--model", "hf", "--model_args", "pretrained=x"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["validate", "--tasks", "a"], ["validate", "--tasks", "a"]),
    ],
)
def test_defaults_are_added_where_nothing_else_is_said(given, expected):
    assert with_defaults(given) == expected


def test_all_but_our_own_options_are_handed_on_in_their_order():
    args = parse(["eval", "--tasks", "a", "b", "--check", "old.json", "-b", "4", "--check_integrity"])
    assert args.check == "old.json"
    assert args.rest == ["--tasks", "a", "b", "-b", "4", "--check_integrity"]


def test_other_commands_hand_on_nothing(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["merge", "--out", "x", "--tasks"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --tasks" in capsys.readouterr().err
