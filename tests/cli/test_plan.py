"""The options of `detspec plan`; plans themselves are tested in tests/planning and aot."""

import pytest

from detspec.cli import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "qwen3_8b", "--target", "v6e"], "unknown target 'v6e'; accepted are"),
        (["--preset", "qwen9", "--target", "v6e:2x2"], "unknown preset 'qwen9'"),
        (["--preset", "qwen3_8b", "--target", "v6e:2x2", "--window", "12"], "power of two, got 12"),
        (["--preset", "qwen3_8b", "--target", "v6e:2x2", "--group", "0"], "at least 1 window (group), got 0"),
        (
            ["--preset", "qwen3_8b", "--target", "v6e:2x2", "--max-requests", "0"],
            "max_requests must be an integer of at least 1, got 0",
        ),
        (["--preset", "qwen3_8b", "--target", "v5e:2x2"], "needs 21.2 GB of v5e:2x2, whose programs may use 16.9 GB"),
        (["--preset", "llama3_3_70b", "--target", "h100"], "at least 3 such devices"),
        (["--preset", "qwen3_8b", "--target", "t4"], "needs 21.2 GB of t4, whose programs may use 12.0 GB"),
        (["--preset", "qwen3_0_6b", "--target", "l4", "--chips", "2"], "l4 has 1 device: it has no link to others"),
        (["--model", "/nowhere", "--target", "h100"], "no such folder"),
        (["--preset", "qwen3_8b", "--target", "v6e:2x2", "--chips", "8"], "v6e:2x2 has 4 devices: name a larger slice"),
        (["--preset", "qwen3_8b", "--target", "h200", "--chips", "3"], "cannot be cut over 3 chips: numbers that divide its"),
        (["--preset", "qwen3_8b", "--target", "v6e:3x4", "--chips", "2"], "no slice 'v6e:3x4': hosts have 2x2 chips"),
    ],
)
def test_plan_refuses_in_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("options", [["--target", "h100"], ["--preset", "qwen3_8b"], ["--preset", "a", "--model", "b"]])
def test_plan_needs_one_model_and_a_target(options: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["plan", *options])
    assert caught.value.code == 2
