"""Differences that the soak over chips counts, and answers that it expects; the runs themselves take minutes."""

import copy

import pytest

from scripts.soak_mesh import CONTROLLED, CONTROLS, MODELS, WAYS, judged, table

DIFFER = "ordinary, 1 chip, 12", "4 chips that add, 64"


@pytest.fixture
def found() -> dict[tuple[str, str], dict]:
    """Two texts of three tokens from each run; in controls the last log-probability has another bit."""
    return {
        (name, way.name): {
            "model": name,
            "way": way.name,
            "tokens": [[1, 2], [3]],
            "bits": [[4, 5], [7 if way.name in DIFFER else 6]],
            **dict.fromkeys(("preemptions", "drafted", "rollbacks"), 0),
        }
        for name in MODELS
        for way in (*WAYS, *CONTROLS)
    }


def test_runs_that_are_equal_but_for_controls_are_sound(found):
    report = judged(found, list(MODELS))
    assert report["sound"]
    assert (report["compared"], report["differ"]) == (3 * 4 * len(MODELS), 0)
    assert f"| {DIFFER[1]} | {len(CONTROLLED)} | 6 | 2 |" in table(report)


@pytest.mark.parametrize("part", ["tokens", "bits"])
def test_one_token_or_bit_that_differs_is_counted(found, part: str):
    found["thinker bfloat16", WAYS[-1].name][part][0][1] += 1
    report = judged(found, list(MODELS))
    assert not report["sound"]
    assert report["differ"] == 1


@pytest.mark.parametrize(("name", "like"), [(DIFFER[0], CONTROLS[0].name), (DIFFER[1], WAYS[0].name)])
def test_control_that_finds_nothing_is_not_sound(found, name: str, like: str):
    found[CONTROLLED[0], name] = copy.deepcopy(found[CONTROLLED[0], like])
    assert not judged(found, list(MODELS))["sound"]


def test_texts_of_other_lengths_are_no_comparison(found):
    found[CONTROLLED[0], WAYS[1].name]["tokens"][0].append(9)
    with pytest.raises(ValueError, match="zip"):
        judged(found, [CONTROLLED[0]])
