"""The JSONL job: every line checked first, bytes that do not depend on the batch, no file under its name unless whole."""

import dataclasses
import json
import random
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from detspec.checkpoint.chat import ChatTemplate
from detspec.engine.batch import beside, check_out, completion_line, new_files, read_requests, run_job
from detspec.engine.engine import Engine, EngineConfig
from detspec.errors import InputError
from detspec.sampling import SamplingParams
from tests.engine.byte_model import SCHEDULE, broken_params, some_prompts, some_sampling, without_tokenizer

DEFAULTS = SamplingParams(max_tokens=8)


def line(**keys: object) -> bytes:
    return json.dumps(keys).encode()


def some_lines(*, deterministic: bool = True) -> list[bytes]:
    """Eight requests, a text among them, with sampling parameters of their own."""
    lines = [line(id="text", prompt="def f(x):\n    return 'é'"), line(id="default", prompt_token_ids=[1, 2, 3])]
    for i, (prompt, sampling) in enumerate(zip(some_prompts(6), some_sampling(6), strict=True)):
        chosen = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "seed": i}
        lines.append(line(id=f"r{i}", prompt_token_ids=prompt, sampling={**chosen, "deterministic": deterministic}))
    return lines


def job(engine: Engine, lines: list[bytes], out: Path) -> list[bytes]:
    requests = read_requests(lines, engine, DEFAULTS, source="in.jsonl")
    run_job(engine, requests, str(out), defaults=DEFAULTS)
    return out.read_bytes().splitlines()


def by_id(lines: list[bytes]) -> dict[str, bytes]:
    return {json.loads(text)["id"]: text for text in lines}


@pytest.fixture(scope="module")
def reference(one_row, tmp_path_factory) -> list[bytes]:
    """The output of one row at a time."""
    return job(one_row, some_lines(), tmp_path_factory.mktemp("job") / "out.jsonl")


def test_output_has_the_order_and_the_keys_it_promises(reference):
    found = [json.loads(text) for text in reference]
    assert [entry["id"] for entry in found] == [json.loads(text)["id"] for text in some_lines()]
    keys = ["id", "token_ids", "text", "logprobs", "finish_reason", "prompt_len", "digest"]
    assert all(list(entry) == keys for entry in found)
    assert found[0]["prompt_len"] == len("def f(x):\n    return 'é'".encode())
    assert [len(entry["token_ids"]) for entry in found[:2]] == [8, 8]


def test_conversation_is_rendered_and_continued(one_row, reference, monkeypatch):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}", {})
    monkeypatch.setattr(one_row, "model", dataclasses.replace(one_row.model, chat_template=template))
    talk = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "    return 'é'"}]
    chat = line(id="text", messages=talk, chat_template_kwargs={"mark": "\n"})
    text = line(id="text", prompt="def f(x):\n    return 'é'\n")
    requests = [read_requests([one], one_row, DEFAULTS, source="in.jsonl")[0] for one in (chat, text)]
    assert requests[0] == requests[1]
    with pytest.raises(InputError, match=r"line 1: the conversation is empty.*\(id 'text'\)"):
        read_requests([line(id="text", messages=[])], one_row, DEFAULTS, source="in.jsonl")


@pytest.mark.parametrize("engine_name", ["three_rows", "eight_rows"])
def test_output_is_the_same_bytes_on_more_rows(engine_name, reference, tmp_path, request):
    assert job(request.getfixturevalue(engine_name), some_lines(), tmp_path / "out.jsonl") == reference


@pytest.mark.parametrize("engine_name", ["one_row", "three_rows", "eight_rows"])
def test_output_of_shuffled_input_is_the_same_bytes_by_id(engine_name, reference, tmp_path, request):
    lines = some_lines()
    random.Random(3).shuffle(lines)
    found = job(request.getfixturevalue(engine_name), lines, tmp_path / "out.jsonl")
    assert by_id(found) == by_id(reference)
    assert found != reference


def test_output_of_ordinary_requests_differs_between_row_counts(one_row, three_rows, eight_rows, tmp_path):
    """The inverse control."""
    found = [
        job(engine, some_lines(deterministic=False), tmp_path / "out.jsonl") for engine in (one_row, three_rows, eight_rows)
    ]
    assert found[0] != found[1] or found[0] != found[2]


def test_logprobs_in_the_output_keep_every_bit(one_row, reference):
    completions = one_row.generate([[1, 2, 3]], DEFAULTS)
    written = json.loads(reference[1])["logprobs"]
    assert np.asarray(written, np.float32).tobytes() == np.asarray(completions[0].logprobs, np.float32).tobytes()
    assert json.loads(completion_line(completions[0]))["logprobs"] == written


def test_statistics_and_manifest_lie_beside_the_output(three_rows, tmp_path):
    job(three_rows, some_lines(), tmp_path / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.manifest.json", "out.stats.json"]
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    assert stats["num_requests"] == 8
    assert stats["num_tokens"] == 16 + sum(sampling.max_tokens for sampling in some_sampling(6))
    assert stats["num_draft_tokens"] >= stats["num_accepted_draft_tokens"] > 0
    assert stats["tok_per_s"] > 0
    names = ("mean_acceptance_length", "draft_acceptance_rate", "num_verify_passes", "num_rollbacks", "num_recomputed_tokens")
    assert set(names) < set(stats)
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["fingerprint"] == three_rows.fingerprint()
    assert manifest["sampling"]["max_tokens"] == 8
    assert manifest["engine"]["schedule"]["rows"] == SCHEDULE.rows


def test_statistics_count_this_job_alone(three_rows, tmp_path):
    counts = []
    for name in ("a.jsonl", "b.jsonl"):
        job(three_rows, some_lines()[:2], tmp_path / name)
        counts.append(json.loads(beside(tmp_path / name, "stats").read_text())["num_verify_passes"])
    assert counts[0] == counts[1]


def test_request_with_logits_that_are_no_numbers_ends_in_error_and_spares_the_others(tmp_path):
    config = EngineConfig(max_rows=3, max_len=64, method="none", schedule=SCHEDULE)
    engine = Engine(without_tokenizer(broken_params(200)), config)
    prompts = {"a": [1, 2], "broken": [1, 2, 200], "b": [7], "c": [3] * 20, "broken too": [200], "d": [9]}

    def run(ids: list[str]) -> tuple[dict[str, bytes], tuple[str, ...]]:
        lines = [line(id=id, prompt_token_ids=prompts[id]) for id in ids]
        requests = read_requests(lines, engine, DEFAULTS, source="in.jsonl")
        result = run_job(engine, requests, str(tmp_path / "out.jsonl"), defaults=DEFAULTS)
        return by_id((tmp_path / "out.jsonl").read_bytes().splitlines()), result.failed

    sound, failed = run([id for id in prompts if "broken" not in id])
    assert failed == ()
    beside_broken, failed = run(list(prompts))
    assert failed == ("broken", "broken too")
    assert {id: text for id, text in beside_broken.items() if id in sound} == sound
    errors = [json.loads(beside_broken[id]) for id in failed]
    assert [(entry["finish_reason"], entry["token_ids"], entry["logprobs"]) for entry in errors] == [("error", [], [])] * 2


# Lines that are refused -----------------------------------------------------------------------------------------------------

SOUND = line(id="sound", prompt_token_ids=[1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"id": "a", ', r"line 2: is not JSON: .* \(column"),
        (b"\xff\xfe", "line 2: is not UTF-8"),
        (b"[1]", "line 2: must be a JSON object, got list"),
        (line(prompt="x"), 'line 2: needs an "id"'),
        (line(id="", prompt="x"), 'line 2: needs an "id"'),
        (line(id=7, prompt="x"), 'line 2: needs an "id", a string that is not empty, got 7'),
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
        (line(id="a", prompt="x", sampling={"stop_token_ids": ["3"]}), "stop_token_ids must hold integers"),
        (b'{"id": "a", "prompt": "x", "sampling": {"temperature": NaN}}', "temperature .* got nan"),
        (SOUND, "line 2: id 'sound' was already used on line 1"),
    ],
)
def test_bad_line_is_refused_by_its_number(bad, message, one_row):
    with pytest.raises(InputError, match="^in.jsonl .*" + message.removeprefix("line 2: ")) as caught:
        read_requests([SOUND, bad, b""], one_row, DEFAULTS, source="in.jsonl")
    assert str(caught.value).startswith("in.jsonl line 2: ")
    assert "\n" not in str(caught.value)


def test_blank_lines_are_skipped_and_counted(one_row):
    assert [r.id for r in read_requests([b"", SOUND, b" \r", b""], one_row, DEFAULTS, source="-")] == ["sound"]
    with pytest.raises(InputError, match="line 4: id 'sound' was already used on line 2"):
        read_requests([b"", SOUND, b" ", SOUND], one_row, DEFAULTS, source="in.jsonl")


@pytest.mark.parametrize("lines", [[], [b""], [b" ", b"\t"]])
def test_input_without_requests_is_refused(lines, one_row):
    with pytest.raises(InputError, match=r"in\.jsonl holds no requests"):
        read_requests(lines, one_row, DEFAULTS, source="in.jsonl")


def test_line_over_the_defaults_keeps_the_others(one_row):
    defaults = SamplingParams(max_tokens=9, temperature=0.5, seed=4)
    lines = [line(id="a", prompt="x", sampling={"seed": 5, "stop_token_ids": [1, 2]}), line(id="b", prompt="x")]
    found = read_requests(lines, one_row, defaults, source="in.jsonl")
    assert found[0].sampling == SamplingParams(max_tokens=9, temperature=0.5, seed=5, stop_token_ids=(1, 2))
    assert found[1].sampling == defaults


# Files ----------------------------------------------------------------------------------------------------------------------


def test_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "in.jsonl").write_text("x")
    for out, message in [
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "out.jsonl", "there is no folder"),
        (tmp_path / "in.jsonl", "is the file that the prompts are read from"),
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
    assert beside(Path("x") / out, "stats") == Path("x") / expected
