"""Files of a job: names next to the output, and nothing under its final name unless it is whole."""

import resource
import signal
from pathlib import Path

import pytest

from detspec.errors import InputError
from detspec.jobs.files import check_out, find_shards, journal_path, new_files, shard_path, sibling


def test_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "in.jsonl").write_text("x")
    for out, message in [
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "out.jsonl", "there is no folder"),
        (tmp_path / "in.jsonl", "is the file of prompts"),
        (Path("/dev/null"), "is a device or a pipe"),
    ]:
        with pytest.raises(InputError, match=message):
            check_out(str(out), str(tmp_path / "in.jsonl"))
    check_out(str(tmp_path / "out.jsonl"), str(tmp_path / "in.jsonl"))
    check_out("-", "-")


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
def test_new_files_after_an_exception_leave_the_old_ones_and_nothing_else(raised, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")

    def fail_half_way() -> None:
        with new_files(out, tmp_path / "out.stats.json") as (file, _):
            file.write(b"new")
            raise raised

    with pytest.raises(raised):
        fail_half_way()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "old"


def test_new_files_on_a_full_disk_leave_the_old_ones_and_nothing_else(tmp_path):
    """A limit on the size of files stands for the full disk: writing fails in the middle, or only when flushed at the end."""
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="too large"), new_files(out) as (file,):
            file.write(b"x" * 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "old"


def test_new_files_appear_together_once_whole(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with new_files(*paths) as files:
        for file in files:
            file.write(b"whole")
        assert not any(path.exists() for path in paths)
        assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    assert [path.read_text() for path in paths] == ["whole"] * 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("out", "expected"), [("out.jsonl", "out.stats.json"), ("out", "out.stats.json"), ("v1.2.jsonl", "v1.2.stats.json")]
)
def test_files_beside_the_output_are_named_after_it(out, expected):
    assert sibling(Path("x") / out, "stats") == Path("x") / expected


def test_shards_are_named_after_the_output_and_found_beside_it(tmp_path):
    out = tmp_path / "out.jsonl"
    names = [shard_path(out, index, 3) for index in range(3)]
    assert [path.name for path in names] == [f"out.0000{i}-of-00003.jsonl" for i in range(3)]
    assert journal_path(names[2]).name == "out.00002-of-00003.jsonl.journal"
    assert sibling(names[2], "rejects").name == "out.00002-of-00003.rejects.jsonl"
    for path in (*names, *map(journal_path, names), sibling(names[0], "stats"), sibling(names[0], "rejects"), out):
        path.touch()
    (tmp_path / "other.00000-of-00003.jsonl").touch()
    assert find_shards(out) == {(index, 3): path for index, path in enumerate(names)}
