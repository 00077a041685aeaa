"""The ablations: their common table, and each at its smallest size, with what must and must not depend on its settings."""

import csv
import importlib
import math
from pathlib import Path
from types import ModuleType

import matplotlib.image
import pytest

from scripts.ablations.table import Options, Plot, Promise, Row, Spread, carry_out, text_of, write_csv

NAMES = ("alignment", "budget", "chunks", "drafts", "dtypes", "on_policy", "pages", "safeguards")
ROWS: list[Row] = [
    {"window": 4, "speed": Spread(1.25, 1.0, 1.5), "share": math.nan, "moved": 0.0, "slow": True},
    {"window": 16, "speed": Spread(math.nan, math.nan, math.nan), "share": 0.5, "moved": 12.5, "slow": False},
]


def ablation(name: str) -> ModuleType:
    return importlib.import_module(f"scripts.ablations.{name}")


def found(name: str, out: Path) -> list[dict[str, str]]:
    """The rows that the ablation writes at its smallest size."""
    assert ablation(name).main(["--size", "tiny", "--out", str(out)]) == 0
    assert matplotlib.image.imread(out / f"{name}.png").shape[0] == 270
    with (out / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_table_is_aligned_and_csv_has_all_digits_and_quartiles(tmp_path: Path):
    lines = text_of(ROWS).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split("|")[1:-1] == [" 4      ", " 1.25 (1-1.5) ", " -     ", " 0     ", " yes  "]
    assert lines[3].split("|")[2].strip() == "-"
    write_csv(tmp_path / "rows.csv", ROWS)
    header, first, _ = (tmp_path / "rows.csv").read_text().splitlines()
    assert header == "window,speed,speed_low,speed_high,share,moved,slow"
    assert first == "4,1.25,1.0,1.5,nan,0.0,True"


def test_spread_is_median_and_quartiles():
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("moved", "code", "said"),
    [
        ((0.0, 12.5), 0, "as promised"),
        ((1.0, 12.5), 1, "moved must be 0 in {'window': 4"),
        ((0.0, 0.0), 1, "moved is 0 in every control"),
    ],
)
def test_command_exit_code_says_whether_bits_are_as_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture, moved: tuple[float, float], code: int, said: str
):
    def measure(options: Options) -> list[Row]:
        assert options == Options(tmp_path / "new", "tiny", 3)
        return [{**row, "moved": share} for row, share in zip(ROWS, moved, strict=True)]

    arguments = ["--out", str(tmp_path / "new"), "--size", "tiny", "--seed", "3"]
    promise = Promise("moved", lambda row: row["window"] == 16)
    assert carry_out("fake", measure, "A fake.", arguments, plot=Plot("window", "slow", ("speed",)), promise=promise) == code
    assert said in capsys.readouterr().out
    assert (tmp_path / "new" / "fake.csv").exists()
    assert matplotlib.image.imread(tmp_path / "new" / "fake.png").shape[:2] == (270, 432)


def test_command_fails_if_its_second_promise_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture):
    plot, kept = Plot("window", "slow", ("speed",)), Promise("moved", lambda row: row["window"] == 16)
    arguments = {"plot": plot, "promise": kept, "also": Promise("slow", lambda row: row["window"] == 16)}
    assert carry_out("fake", lambda options: ROWS, "A fake.", ["--out", str(tmp_path)], **arguments) == 1
    assert "bits: slow must be 0 in {'window': 4" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_help_is_the_lab_note_and_bad_seeds_are_refused(name: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        ablation(name).main(["--help"])
    assert ended.value.code == 0
    assert f"python -m scripts.ablations.{name}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        ablation(name).main(["--seed", "-1"])
    assert ended.value.code == 2
    assert "--seed must be at least 0, got -1" in capsys.readouterr().err


@pytest.mark.slow
def test_budget_cuts_keep_bits_and_unverified_drafts_do_not(tmp_path: Path):
    plain, cut, control = found("budget", tmp_path)
    assert [row["moved %"] for row in (plain, cut)] == ["0.0", "0.0"]
    assert float(control["moved %"]) > 0
    assert 1 < float(cut["tokens a pass"]) < 4
    assert float(plain["recomputed %"]) == 0 < float(cut["recomputed %"]) < 100


@pytest.mark.slow
def test_drafts_change_acceptance_and_no_bit(tmp_path: Path):
    rows = {(row["draft"], row["temperature"]): row for row in found("drafts", tmp_path)}
    assert len(rows) == 8
    for (draft, _), row in rows.items():
        assert (float(row["moved %"]) > 0) == (draft == "unverified")
        if draft != "unverified":
            assert (float(row["tokens a pass"]) == 1) == (draft == "none" or math.isnan(float(row["accepted %"])))
    assert all(float(rows["int8", temperature]["accepted %"]) > 80 for temperature in ("0.0", "1.0"))


@pytest.mark.slow
def test_pages_move_bits_and_neighbours_only_those_of_splits(tmp_path: Path):
    default, paged, split = found("pages", tmp_path)
    assert [row["moved by neighbours %"] for row in (default, paged)] == ["0.0", "0.0"]
    assert float(split["moved by neighbours %"]) > 0
    assert float(default["moved %"]) == 0 < float(paged["moved %"])


@pytest.mark.slow
def test_dtypes_narrow_caches_move_bits_and_rounded_weights_the_loss(tmp_path: Path):
    wide, narrow, rounded = found("dtypes", tmp_path)
    assert [row["moved %"] for row in (wide, rounded)] == ["0.0", "0.0"]
    assert float(narrow["moved %"]) > 0
    assert 2 * int(narrow["bytes a position"]) == int(wide["bytes a position"])
    losses = [float(row["nats a token"]) for row in (wide, narrow, rounded)]
    assert len(set(losses)) == 3
    assert max(losses) < 1.01 * min(losses)


@pytest.mark.slow
def test_alignment_verifies_again_and_moves_no_bit(tmp_path: Path):
    plain, free, aligned, control = found("alignment", tmp_path)
    assert [row["moved %"] for row in (plain, free, aligned)] == 3 * ["0.0"]
    assert float(control["moved %"]) > 0
    assert 1 < float(aligned["tokens a pass"]) < float(free["tokens a pass"])


@pytest.mark.slow
def test_safeguards_native_sums_let_bits_depend_on_the_batch(tmp_path: Path):
    few, many, native_few, native_many = found("safeguards", tmp_path)
    assert [few["requests"], native_few["requests"]] == ["4", "4"]
    assert [row["moved by the batch %"] for row in (few, many, native_many)] == 3 * ["0.0"]
    assert float(native_few["moved by the batch %"]) > 0


@pytest.mark.slow
def test_chunks_thoughts_answer_in_any_order_and_without_them_answers_are_guesses(tmp_path: Path):
    thinking, without = found("chunks", tmp_path)
    assert (thinking["right % of 40"], thinking["moved %"]) == ("100.0", "0.0")
    assert float(without["right % of 40"]) < 100
    assert float(thinking["passes a prompt"]) > 1 > float(without["passes a prompt"])


@pytest.mark.slow
def test_on_policy_trainers_agree_and_places_move_only_what_ordinary_engines_sampled(tmp_path: Path):
    rows = found("on_policy", tmp_path)
    exact, ordinary = ([row for row in rows if row["policy"] == name] for name in ("exact", "ordinary engine"))
    assert {(row["differ"], row["largest ratio"], row["K3"], row["SHA-256"]) for row in exact} == {
        ("0", "1.0", "0.0", exact[0]["SHA-256"])
    }
    assert len(exact) == len(ordinary) == 2
    assert ordinary[0]["SHA-256"] != ordinary[1]["SHA-256"]
    assert all(int(row["differ"]) > 0 for row in rows if row["policy"] != "exact")
