"""The figure of the README's first screen: bars against a race worked out by hand, and that recorded figures can be drawn."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("draw_first_screen")


def test_bars_are_median_rates_of_decoding_with_the_texts_that_change(script: ModuleType):
    """Rounds decode 32 requests of 5 - 1 tokens in 1, 2 and 4 seconds: 32 * 4 / 2 = 64 tokens a second."""
    samples = [
        {"batch": batch, "system": name, "round": i, "whole_s": 3.0 + whole, "first_s": 3.0}
        for name in script.SYSTEMS
        for batch in (1, 32)
        for i, whole in enumerate((4.0, 1.0, 2.0) if batch == 32 else (9.0, 9.0, 9.0))
    ]
    systems = {name: {"num_changed": number} for number, name in enumerate(script.SYSTEMS)}
    bars = script.bars_of({"samples": samples, "settings": {"new_tokens": 5}, "systems": systems})
    assert [bar.tok_per_s for bar in bars] == [64.0] * len(script.SYSTEMS)
    assert [bar.num_changed for bar in bars] == list(range(len(bars)))
    assert [bar.is_own for bar in bars] == [True] + [False] * (len(bars) - 1)


def test_recorded_texts_fork_in_ordinary_generation_alone_and_the_picture_is_small(script: ModuleType, tmp_path: Path):
    forks = json.loads(script.RECORDED.read_text())["forks"]
    assert any(fork is not None for fork in forks["ordinary"])
    assert not any(fork is not None for fork in forks["deterministic"])
    assert script.main(["--picture", str(tmp_path / "a.png")]) == 0
    assert all(0 < path.stat().st_size < 120_000 for path in (tmp_path / "a.png", script.PICTURE))
