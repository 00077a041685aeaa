"""A file of prompts: every line checked, ids compared across shards, and nothing of it held."""

import io
import json
from collections import Counter

import pytest

from detspec.engine.engine import Engine
from detspec.engine.intake import request_of
from detspec.errors import InputError
from detspec.jobs.prompts import UNSHARDED, JobSpec, Prompts
from detspec.jobs.scan import Spool, block, read_lines
from detspec.read_json import parse_json
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import byte_params, make_engine, without_tokenizer

DEFAULTS = SamplingParams(max_tokens=8)


def line(**keys: object) -> bytes:
    return json.dumps(keys).encode()


@pytest.fixture
def write(tmp_path):
    """Puts lines into `in.jsonl` and opens it; its name in messages is `in.jsonl`."""

    def write(lines: list[bytes]) -> Prompts:
        (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
        prompts = Prompts(str(tmp_path / "in.jsonl"))
        prompts.name = "in.jsonl"
        return prompts

    return write


def read(prompts: Prompts, engine: Engine, *, defaults=DEFAULTS, shard=UNSHARDED, rejected: list | None = None) -> list:
    """The requests of a file, or of a shard of it; malformed lines go into `rejected` if there is such a list."""
    spec = JobSpec(prompts, defaults, shard, "stop" if rejected is None else "reject")
    with prompts, read_lines(engine, spec) as reading:
        if rejected is not None:
            rejected += reading.rejects
        return [asked.requests[0] for asked in reading.todo()]


SOUND = line(id="sound", prompt_token_ids=[1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"id": "a", ', r"line 2: is not JSON: .* \(column"),
        (b"\xff\xfe", "line 2: is not UTF-8"),
        (b"[1]", "line 2: must be a JSON object, got list"),
        (line(id="", prompt="x"), 'line 2: "id" must be a string that is not empty, or an integer'),
        (line(id=7.0, prompt="x"), 'line 2: "id" must be a string that is not empty, or an integer, got 7.0'),
        (line(id=True, prompt="x"), "line 2: .* got True"),
        (line(id="a"), 'line 2: needs one of "prompt", "prompt_token_ids" and "messages"'),
        (line(id="a", prompt="x", prompt_token_ids=[1]), "line 2: needs one of"),
        (line(id="a", messages=[{"role": "user", "content": "x"}]), "line 2: the checkpoint has no chat template"),
        (line(id="a", messages="hi"), 'line 2: "messages" must be a list'),
        (line(id="a", messages=[], chat_template_kwargs={"messages": []}), "line 2: .* must not hold messages"),
        (line(id="a", messages=[], chat_template_kwargs={"now": 3}), "line 2: .* must not hold now"),
        (line(id="a", prompt=[1]), '"prompt" must be a string'),
        (line(id="a", prompt_token_ids="x"), '"prompt_token_ids" must be a list'),
        (line(id="a", prompt=""), r"line 2: the prompt is empty.*\(id 'a'\)"),
        (line(id="a", prompt_token_ids=[]), "line 2: the prompt is empty"),
        (
            line(id="a", prompt_token_ids=[1, 2048]),
            r"line 2: the prompt holds token id 2048; accepted are integers in 0 \.\. 2047",
        ),
        (line(id="a", prompt_token_ids=[1.5]), "token id 1.5"),
        (line(id="a", prompt_token_ids=[1] * 60), "line 2: the prompt has 60 tokens .* max_len of 64"),
        (
            line(id="a", promt="x"),
            "line 2: unknown key 'promt'; accepted: id, prompt, prompt_token_ids, messages, chat_template_kwargs, sampling",
        ),
        (line(id="a", prompt="x", sampling=[]), '"sampling" must be a JSON object'),
        (line(id="a", prompt="x", sampling={"temp": 1}), "line 2: unknown sampling parameter 'temp'; accepted: max_tokens, "),
        (line(id="a", prompt="x", sampling={"temperature": -1}), "line 2: sampling parameter temperature .* got -1"),
        (line(id="a", prompt="x", sampling={"top_p": 0}), "line 2: sampling parameter top_p .* got 0"),
        (line(id="a", prompt="x", sampling={"seed": 1.5}), "line 2: sampling parameter seed .* got 1.5"),
        (line(id="a", prompt="x", sampling={"max_tokens": 0}), "line 2: sampling parameter max_tokens .* got 0"),
        (line(id="a", prompt="x", sampling={"stop_token_ids": 3}), "stop_token_ids must be a list of token ids, got 3"),
        (line(id="a", prompt="x", sampling={"stop_token_ids": ["3"]}), "stop_token_ids must be a list of token ids .* got '3'"),
        (b'{"id": "a", "prompt": "x", "sampling": {"temperature": NaN}}', "temperature .* got nan"),
        (b'{"id": "a", "prompt_token_ids": [' + b"9" * 5000 + b"]}", "line 2: is JSON that cannot be read"),
        (b'{"id": "a", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 2: is JSON that cannot be read"),
        (b'{"id": "a", "prompt": "\\ud800"}', "line 2: holds one half of a surrogate pair"),
        (SOUND, "line 2: id 'sound' was already used on line 1"),
    ],
)
def test_bad_line_is_refused_by_its_number(bad, message, one_row, write):
    with pytest.raises(InputError, match="^in.jsonl .*" + message.removeprefix("line 2: ")) as caught:
        read(write([SOUND, bad, b""]), one_row)
    assert str(caught.value).startswith("in.jsonl line 2: ")
    assert "\n" not in str(caught.value)


def test_bad_lines_are_handed_over_and_the_sound_ones_kept(one_row, write):
    lines = [SOUND, b"{", line(id="long", prompt_token_ids=[1] * 60), b"", SOUND, b"\xff", line(id="last", prompt="x")]
    rejected: list[bytes] = []
    found = read(write(lines), one_row, rejected=rejected)
    assert [request.id for request in found] == ["sound", "last"]
    errors = [json.loads(text) for text in rejected]
    assert [error["line"] for error in errors] == [2, 3, 5, 6]
    assert [error["raw"] for error in errors] == ["{", lines[2].decode(), SOUND.decode(), "\\xff"]
    assert "is not JSON" in errors[0]["error"]
    assert "max_len of 64" in errors[1]["error"]
    assert errors[2]["error"] == "id 'sound' was already used on line 1"


def test_text_with_a_pair_of_surrogates_is_text(one_row, write):
    assert [r.id for r in read(write([b'{"id": "a", "prompt": "\\ud83d\\ude00"}']), one_row)] == ["a"]


def test_blank_lines_are_skipped_and_counted(one_row, write):
    assert [r.id for r in read(write([b"", SOUND, b" \r", b""]), one_row)] == ["sound"]
    with pytest.raises(InputError, match="line 4: id 'sound' was already used on line 2"):
        read(write([b"", SOUND, b" ", SOUND]), one_row)


@pytest.mark.parametrize("lines", [[], [b""], [b" ", b"\t"]])
def test_input_without_requests_is_refused(lines, one_row, write):
    with pytest.raises(InputError, match=r"in\.jsonl holds no requests"):
        read(write(lines), one_row)


def test_line_over_the_defaults_keeps_the_others(one_row, write):
    defaults = SamplingParams(max_tokens=9, temperature=0.5, seed=4)
    lines = [line(id="a", prompt="x", sampling={"seed": 5, "stop_token_ids": [1, 2]}), line(id="b", prompt="x")]
    found = read(write(lines), one_row, defaults=defaults)
    assert found[0].sampling == SamplingParams(max_tokens=9, temperature=0.5, seed=5, stop_token_ids=(1, 2))
    assert found[1].sampling == defaults


def test_scan_counts_what_a_job_will_take(one_row, write):
    lines = [line(id="a", prompt="abc"), b"{", line(id="b", prompt="x", sampling={"max_tokens": 20})]
    with write(lines) as prompts, read_lines(one_row, JobSpec(prompts, DEFAULTS, on_error="reject")) as reading:
        found = reading.found
    assert (found.num_lines, found.num_requests, found.num_rejected, found.num_completions) == (3, 2, 1, 2)
    assert (found.num_prompt_tokens, found.longest_prompt, found.num_new_tokens, found.most_new_tokens) == (4, 3, 28, 20)


# Shards ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 4, 12])
def test_shards_are_blocks_that_cover_the_file_once(count, one_row, write):
    lines = [text for i in range(10) for text in (line(id=f"r{i}", prompt="x"), b"")]
    found = [[r.id for r in read(write(lines), one_row, shard=(index, count))] for index in range(count)]
    assert [id for part in found for id in part] == [f"r{i}" for i in range(10)]
    assert {len(part) for part in found} <= {10 // count, 10 // count + 1}
    assert block(10, 1, 4) == (2, 5)


def test_every_shard_sees_an_id_that_another_one_has_too(one_row, write):
    lines = [line(id=id, prompt="x") for id in ("a", "b", "c", "a")]
    for index in (0, 1):
        with pytest.raises(InputError, match="line 4: id 'a' was already used on line 1"):
            read(write(lines), one_row, shard=(index, 2))
    rejected: list[bytes] = []
    found = [[r.id for r in read(write(lines), one_row, shard=(i, 2), rejected=rejected)] for i in (0, 1)]
    assert found == [["a", "b"], ["c"]]
    assert [json.loads(text)["line"] for text in rejected] == [4]


def test_shard_checks_no_prompts_of_others(one_row, write):
    lines = [line(id="a", prompt="x"), line(id="b", prompt="")]
    assert [r.id for r in read(write(lines), one_row, shard=(0, 2))] == ["a"]
    with pytest.raises(InputError, match="line 2: the prompt is empty"):
        read(write(lines), one_row, shard=(1, 2))


def test_ids_that_share_a_hash_are_told_apart(one_row, write, monkeypatch):
    monkeypatch.setattr("detspec.jobs.scan.hash_id", lambda id: len(id))
    assert [r.id for r in read(write([line(id=id, prompt="x") for id in ("a", "b", "cc")]), one_row)] == ["a", "b", "cc"]
    with pytest.raises(InputError, match="line 3: id 'a' was already used on line 1"):
        read(write([line(id=id, prompt="x") for id in ("a", "b", "a")]), one_row)


# Files ----------------------------------------------------------------------------------------------------------------------


def test_requests_that_are_done_are_passed_over(one_row, write):
    lines = [line(id=f"r{i}", prompt="x") for i in range(3)]
    with write(lines) as prompts, read_lines(one_row, JobSpec(prompts, DEFAULTS)) as reading:
        made = reading.todo(lambda number: number == 1)
        assert [(asked.number, asked.requests[0].id) for asked in made] == [(0, "r0"), (2, "r2")]


@pytest.mark.parametrize("ids", ["abc", "abca"])
def test_each_line_is_read_and_tokenized_once_unless_an_id_is_there_twice(ids, one_row, write, monkeypatch):
    """The control: with an id that is there twice, lines are read three times and tokenized twice."""
    counts = Counter()

    def counted(name: str, fn):
        return lambda *args, **keywords: counts.update([name]) or fn(*args, **keywords)

    monkeypatch.setattr("detspec.jobs.lines.parse_json", counted("read", parse_json))
    monkeypatch.setattr("detspec.jobs.lines.request_of", counted("tokenized", request_of))
    lines = [line(id=id, prompt="x") for id in ids]
    with write(lines) as prompts, read_lines(one_row, JobSpec(prompts, DEFAULTS, on_error="reject")) as reading:
        assert [asked.number for asked in reading.todo()] == [0, 1, 2]
    assert counts == ({"read": 3, "tokenized": 3} if ids == "abc" else {"read": 12, "tokenized": 7})


def test_spool_gives_back_what_was_added_from_memory_and_from_a_file(tmp_path, monkeypatch):
    for most in (1 << 20, 1):
        monkeypatch.setattr("detspec.jobs.scan.MOST_BYTES", most)
        with Spool(tmp_path) as spool:
            for number in range(100):
                spool.add((number, b"x" * number))
            assert [list(spool), list(spool)] == [[(number, b"x" * number) for number in range(100)]] * 2
            spool.clear()
            spool.add("after")
            assert list(spool) == ["after"]
        assert list(tmp_path.iterdir()) == []


def test_file_that_changes_under_the_job_is_refused(write):
    with write([line(id="a", prompt="x"), line(id="b", prompt="x")]) as prompts:
        lines = prompts.lines()
        next(lines)
        with open(prompts.source, "ab") as file:
            file.write(b"\n")
        with pytest.raises(InputError, match=r"in\.jsonl was changed while the job read it"):
            list(lines)


def test_standard_input_is_read_as_often_as_a_file(one_row, write, monkeypatch):
    text = line(id="a", prompt="x") + b"\n" + line(id="b", prompt="x")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    with Prompts("-") as prompts, write([text]) as same:
        assert prompts.name == "stdin"
        assert prompts.sha256 == same.sha256
        with read_lines(one_row, JobSpec(prompts, DEFAULTS)) as reading:
            assert [asked.requests[0].id for asked in reading.todo()] == ["a", "b"]


def test_text_without_a_tokenizer_is_refused(write):
    engine = make_engine(without_tokenizer(byte_params()), 1, "none")
    with pytest.raises(InputError, match="line 1: the checkpoint has no tokenizer"):
        read(write([line(id="a", prompt="x")]), engine)
