"""The journal: what was written is read back bit for bit, what was torn is cut off, what was damaged is refused."""

import json

import pytest

from detspec.errors import InputError
from detspec.jobs.journal import open_journal, read_journal, sound_lines
from detspec.jobs.lines import Output

HEADER = {"fingerprint": {"model": "abc", "jax": "1"}, "sampling": {"temperature": 0.0}, "shard": [0, 1]}
COUNTS = [1, 0, 2, 1]  # requests 10 to 13; 11 was rejected, 12 has two completions
LINES = {
    (10, 0): b'{"id": "a"}',
    (12, 0): b'{"id": "c", "x": 0.1}',
    (12, 1): '{"id": "c", "é": 1}'.encode(),
    (13, 0): b'{"id": "d"}',
}


def fill(path, keys):
    """Adds completions in this order, each in a segment of its own; returns the size of the file after each."""
    sizes = []
    with open_journal(path, HEADER) as journal:
        journal.load(10, COUNTS)
        for key in keys:
            journal.add(key[0], Output(key[1], 3, "error" if key == (12, 1) else "stop", LINES[key]))
            journal.flush()
            sizes.append(path.stat().st_size)
    return sizes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl.journal"


def test_completions_come_back_in_the_order_of_the_input(path):
    fill(path, [(13, 0), (12, 1)])
    fill(path, [(10, 0), (12, 0)])  # opened again
    with open_journal(path, HEADER) as journal:
        journal.load(10, COUNTS)
        assert [output.line for output in journal.outputs()] == list(LINES.values())
        assert (journal.num_kept, journal.num_tokens, journal.num_failed) == (4, 12, 1)
        journal.remove()
    assert not path.exists()


def test_every_line_of_the_file_is_json(path):
    fill(path, list(LINES))
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert entries[0]["header"] == HEADER
    assert [(entry["number"], entry["index"]) for entry in entries[1:]] == list(LINES)


def test_request_is_here_once_all_its_completions_are(path):
    with open_journal(path, HEADER) as journal:
        journal.load(10, COUNTS)
        for key, expected in [((12, 0), False), ((12, 1), True)]:
            journal.add(key[0], Output(key[1], 1, "stop", LINES[key]))
            journal.flush()
            assert journal.has(12) is expected
        assert [journal.has(number) for number in (10, 11, 13)] == [False, True, False]


def test_completion_that_is_here_is_not_added_again(path):
    before = fill(path, [(10, 0)])
    assert fill(path, [(10, 0)]) == before


def test_tail_torn_at_any_byte_is_cut_off_and_written_again(path):
    *_, sound, whole = fill(path, list(LINES))
    content = path.read_bytes()
    for size in range(sound, whole):
        for tail in (b"", b"\0" * (whole - size)):  # after a loss of power, blocks that were never written hold zeros
            path.write_bytes(content[:size] + tail)
            with open_journal(path, HEADER) as journal:
                journal.load(10, COUNTS)
                assert (journal.num_kept, journal.has(13)) == (3, False)
                assert path.stat().st_size == sound
    assert fill(path, [(13, 0)]) == [whole]
    assert path.read_bytes() == content


@pytest.mark.parametrize("entry", [0, 1, 2])
def test_damage_in_the_middle_is_refused_and_leaves_the_file(entry, path):
    sizes = fill(path, list(LINES))
    content = bytearray(path.read_bytes())
    begins = content.index(b"\n") + 1 if entry == 0 else sizes[entry - 1]
    content[begins + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"is damaged at byte {begins}, .*--fresh"), open_journal(path, HEADER) as journal:
        journal.load(10, COUNTS)
    assert path.read_bytes() == content


def test_journal_that_kept_nothing_stands_in_no_ones_way(path):
    with pytest.raises(KeyboardInterrupt), open_journal(path, HEADER):
        raise KeyboardInterrupt
    assert not path.exists()
    fill(path, [])  # as a kill leaves it
    with open_journal(path, {"another": "job"}) as journal:
        journal.load(0, [1])
    fill(path, [(10, 0)])
    with pytest.raises(KeyboardInterrupt), open_journal(path, HEADER):
        raise KeyboardInterrupt
    assert path.exists()


def test_header_that_is_torn_is_written_anew_and_a_damaged_one_refused(path):
    fill(path, [])
    header = path.read_bytes()
    for size in range(len(header)):
        path.write_bytes(header[:size])
        fill(path, [])
        assert path.read_bytes() == header
    fill(path, [(10, 0)])
    path.write_bytes(path.read_bytes().replace(b"abc", b"abd"))
    with pytest.raises(InputError, match="is damaged in its first line"):
        fill(path, [])


def test_file_that_is_no_journal_is_refused_and_left_as_it_is(path):
    for content in ("a diary\n", '{"id": "a"}'):
        path.write_text(content)
        with pytest.raises(InputError, match="is no journal of a job"):
            fill(path, [])
        assert path.read_text() == content


def test_journal_of_another_job_is_refused_naming_what_differs(path):
    fill(path, [(10, 0)])
    other = {"fingerprint": {"model": "xyz", "jax": "1"}, "sampling": {"temperature": 0.8, "n": 2}, "shard": [1, 2]}
    with pytest.raises(InputError) as caught, open_journal(path, other):
        raise AssertionError("never reached")
    assert (
        'belongs to another job: fingerprint.model: journal has "abc", this job has "xyz"; '
        "sampling.temperature: journal has 0.0, this job has 0.8; sampling.n: journal has null, this job has 2; "
        "shard: journal has [0, 1], this job has [1, 2]. "
    ) in str(caught.value)
    assert "jax" not in str(caught.value)
    with open_journal(path, other, fresh=True) as journal:
        journal.load(0, [1])
        assert journal.num_kept == 0


def test_journal_in_use_is_refused_and_free_afterwards(path):
    with open_journal(path, HEADER):
        with pytest.raises(InputError, match="is in use: another process"), open_journal(path, HEADER):
            pass
        with pytest.raises(InputError, match="is in use"), open_journal(path, HEADER, fresh=True):
            pass
    with open_journal(path, HEADER):
        pass


def test_file_system_without_locks_gives_one_warning(path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    assert len(fill(path, [(10, 0)])) == 1
    assert capsys.readouterr().err.count("cannot be locked (Function not implemented)") == 1


def test_looking_at_a_journal_changes_nothing(path):
    assert read_journal(path, HEADER) is None
    *_, last = fill(path, list(LINES))
    path.write_bytes(path.read_bytes()[: last - 1])
    journal = read_journal(path, HEADER)
    journal.load(10, COUNTS)
    assert journal.num_kept == 3
    assert path.stat().st_size == last - 1


def test_entries_of_requests_that_are_rejected_now_are_passed_over(path):
    fill(path, list(LINES))
    with open_journal(path, HEADER) as journal:
        journal.load(10, [1, 0, 0, 1])
        assert [output.line for output in journal.outputs()] == [LINES[10, 0], LINES[13, 0]]


def test_failed_write_keeps_what_was_written_before_and_tears_nothing_else(path, monkeypatch):
    """The second entry is cut in the middle by a full disk; the third must not be put behind it."""
    room = [10**6, 20]

    def write(file, raw):
        size = min(len(raw), room.pop(0))
        file.write(raw[:size])
        if size < len(raw):
            raise OSError(28, "No space left on device")

    fill(path, [])
    monkeypatch.setattr("detspec.jobs.journal._write", write)
    with open_journal(path, HEADER) as journal:
        journal.load(10, COUNTS)
        for key in LINES:
            journal.add(key[0], Output(key[1], 1, "stop", LINES[key]))
        with pytest.raises(OSError, match="No space"):
            journal.flush()
        journal.sync()
    monkeypatch.undo()
    with open_journal(path, HEADER) as journal:
        journal.load(10, COUNTS)
        assert journal.num_kept == 1


def test_journal_that_is_being_written_ends_before_what_is_not_whole(tmp_path):
    """A reader may see the first half of an entry, and the next moment its rest and sound ones after that."""
    path = tmp_path / "journal"
    with open_journal(path, HEADER) as journal:
        journal.load(10, COUNTS)
        start = journal.end
        for key in LINES:
            journal.add(key[0], Output(key[1], 1, "stop", LINES[key]))
        journal.sync()
    entries = path.read_bytes()[start:].splitlines(keepends=True)
    torn = [entries[0], entries[1][5:], *entries[2:]]
    path.write_bytes(path.read_bytes()[:start] + b"".join(torn))
    assert list(sound_lines(path, start, is_written=True)) == entries[:1]
    with pytest.raises(InputError, match="is damaged at byte"):
        list(sound_lines(path, start))
    path.write_bytes(path.read_bytes()[:start] + entries[0] + entries[1][:-5])
    assert list(sound_lines(path, start)) == entries[:1]
