"""The comparison of bits between commits: a changed bit is found, and named."""

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from detspec import Completion, Stats

SCRIPTS = Path(__file__).parents[1] / "scripts"
DONE = Completion("0", (5, 17), (9, 3), (-0.5, -1.25), "ab", "stop", "d1" * 32, Stats(num_verify_passes=2))
FOUND = {"llama": ("1" * 64, "2" * 64), "drafts: auto": ("3" * 64, "4" * 64)}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("compare_bits")


def hashes(script, done) -> tuple[str, str]:
    record = importlib.import_module("bits_parts.record").Record()
    record.completions([done])
    return record.found


def test_one_bit_of_a_log_probability_changes_the_first_hash_alone(script):
    bits, digests = hashes(script, DONE)
    changed = np.nextafter(np.float32(-1.25), np.float32(0)).item()
    other, same = hashes(script, dataclasses.replace(DONE, logprobs=(-0.5, changed)))
    assert (other != bits, same == digests) == (True, True)


def test_a_digest_changes_the_second_hash_alone_and_counters_none(script):
    bits, digests = hashes(script, DONE)
    same, other = hashes(script, dataclasses.replace(DONE, digest="d2" * 32))
    assert (same == bits, other != digests) == (True, True)
    assert hashes(script, dataclasses.replace(DONE, stats=Stats())) == (bits, digests)


def test_what_was_printed_is_compared_and_each_part_that_differs_is_named(script, tmp_path, monkeypatch, capsys):
    now = dict(FOUND)
    monkeypatch.setattr(script, "run_at", lambda root, only, quick: iter(now.items()))
    assert script.main([]) == 0
    before = tmp_path / "before.txt"
    before.write_text(capsys.readouterr().out)
    assert script.main(["--expect", str(before)]) == 0
    capsys.readouterr()

    now["drafts: auto"] = ("5" + "3" * 63, "4" * 64)
    assert script.main(["--expect", str(before)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "differs: drafts: auto (bits)"
    now = {"llama": ("failed", "failed")}
    assert script.main(["--expect", str(before)]) == 1
    last = "not compared: drafts: auto|differs: llama (bits)|differs: llama (digests)|failed: llama"
    assert capsys.readouterr().out.splitlines()[-4:] == last.split("|")


@pytest.mark.slow
def test_a_part_gives_the_same_hashes_again(script, tmp_path, capfd):
    assert script.main(["--only", "qwen3"]) == 0
    before = tmp_path / "before.txt"
    before.write_text(capfd.readouterr().out)
    assert script.main(["--only", "qwen3", "--expect", str(before)]) == 0
    assert set(script.read(before.read_text())) == {"qwen3"}
