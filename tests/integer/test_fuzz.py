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
    assert fuzz_integer.main(["--number", "1", "--seed", "20013"]) == 1
    found = capsys.readouterr().out
    assert "--seed 20013 --number 1" in found
    assert "log-probabilities" in found


def bias_forgotten(logits, tokens, bias):
    return logits


def ban_forgotten(logits, position, tokens, until):
    return logits


def last_of_equals(logits, number):
    return logits.shape[1] - 1 - spec_likeliest(logits[:, ::-1], number)


spec_likeliest = spec.likeliest


@pytest.mark.parametrize(
    ("name", "other"), [("biased", bias_forgotten), ("banned", ban_forgotten), ("likeliest", last_of_equals)]
)
def test_control_of_a_definition_without_an_option_is_found(name, other, monkeypatch):
    assert fuzz_integer.trial(20_013, 15)[0] == []
    monkeypatch.setattr(spec, name, other)
    assert any(fuzz_integer.trial(seed, 15)[0] for seed in range(20_013, 20_103, 9))  # all of one shape
