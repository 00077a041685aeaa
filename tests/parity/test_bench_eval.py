"""The comparison of evaluations with transformers': its table, and a small run of it."""

import json

from scripts.bench_eval import OURS, best, main, ratios, table

ROUNDS = [
    {
        OURS: {"clock_s": 1.0, "processor_s": 2.0, "accuracy": 0.5},
        "a": {"clock_s": 3.0 * factor, "processor_s": 4.0, "accuracy": 0.5},
        "b": {"clock_s": 2.0 * factor, "processor_s": 8.0, "accuracy": 0.5},
    }
    for factor in (1, 2, 10)
]


def test_ratios_are_medians_of_rounds_and_the_best_setting_has_the_least():
    assert ratios(ROUNDS) == {OURS: (1.0, 1.0), "a": (6.0, 2.0), "b": (4.0, 4.0)}
    assert best(ROUNDS) == "b"
    assert table(ROUNDS).splitlines()[-3:] == ["| b | 4.00 | 8.00 | 4.00, 4.00 | 0.500 |", "", "the best of transformers: b"]


def test_small_run_measures_both_sides(tmp_path, capsys):
    asked = ["--questions", "3", "--context", "60", "--few-shot", "1", "--batch-sizes", "2", "--dtypes", "bfloat16"]
    found = tmp_path / "eval.json"
    assert main([*asked, "--repeats", "1", "--least", "0", "--json", str(found)]) == 0
    (measured,) = json.loads(found.read_text())["rounds"]
    assert set(measured) == {OURS, "transformers, bfloat16, batch 2"}
    assert all(values["clock_s"] > 0 for values in measured.values())
    assert "the best of transformers: transformers, bfloat16, batch 2" in capsys.readouterr().out
