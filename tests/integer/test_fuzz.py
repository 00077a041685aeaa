"""The fuzzer of integer models passes a model, and ends with 1 where the definition is another."""

import pytest

from detspec.integer import spec
from scripts import fuzz_integer

pytestmark = pytest.mark.slow


def test_trial_finds_no_difference_and_a_control_of_another_constant_one(monkeypatch, capsys):
    assert fuzz_integer.main(["--number", "1", "--seed", "20004"]) == 0
    assert fuzz_integer.main(["--number", "1", "--seed", "20004", "--weights", "integer8"]) == 0
    assert capsys.readouterr().out.count("1 models") == 2
    monkeypatch.setattr(spec, "LN_2", spec.LN_2 + 1)
    assert fuzz_integer.main(["--number", "1", "--seed", "20010"]) == 1
    found = capsys.readouterr().out
    assert "--seed 20010 --number 1" in found
    assert "log-probabilities" in found
