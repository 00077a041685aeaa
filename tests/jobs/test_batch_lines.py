"""OpenAI's batch lines: read by the official client's types, the same bytes in any batch and shards, errors apart."""

import dataclasses
import json
from pathlib import Path

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from detspec.checkpoint.chat import ChatTemplate
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.jobs.batch_lines import seed_of
from detspec.jobs.files import shard_path, sibling
from detspec.jobs.generation import Stopped
from detspec.jobs.job import Unfinished, run_job, stream_job
from detspec.jobs.manifest import job_header
from detspec.jobs.merge import merge
from detspec.jobs.prompts import UNSHARDED, JobSpec, Prompts
from detspec.jobs.scan import is_openai
from detspec.jobs.worker import WorkerOptions, run_worker
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import SCHEDULE, broken_params, without_tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def line(custom_id: object, url: str = COMPLETIONS, **body: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


SCORE = {"max_tokens": 0, "echo": True}


def some_lines(*, deterministic: bool = True) -> list[bytes]:
    own = {"max_tokens": 6, "is_deterministic": deterministic}
    talk = [{"role": "user", "content": "def f"}]
    return [
        line("greedy", prompt="def f(x):", temperature=0, logprobs=2, **own),
        line("drawn", prompt="def f(x):", **own),
        line("several", prompt=[[1, 2, 3], [4], [1, 2, 3]], n=2, seed=7, return_token_ids=True, **own),
        line("chat", CHAT, messages=talk, logprobs=True, top_logprobs=2, **own),
        line("echo", prompt="ab", echo=True, logprobs=1, **own),
        line("again", prompt="def f(x):", seed=3, **own),
        line("score", prompt="def f(x):", logprobs=2, **{**own, **SCORE}),
        line("scores", prompt=[[1, 2, 3], [4], list(range(40))], logprobs=0, temperature=0.5, **{**own, **SCORE}),
    ]


BAD_LINES = [
    (line("hot", prompt="a", temperature=-1), "hot", "temperature"),
    (line("odd", prompt="a", guided_json={}), "odd", "guided_json"),
    (line("long", prompt="a" * 60), "long", "prompt"),
    (line("score of what", prompt="a", max_tokens=0), "score of what", "max_tokens"),
    (line("stream", prompt="a", stream=True), "stream", "stream"),
    (line("url", "/v1/embeddings", prompt="a"), "url", "url"),
    (b"{", None, None),
    (b"{", None, None),
    (line(5, prompt="a"), None, None),
    (line("greedy", prompt="b"), "greedy", None),
]


@pytest.fixture(scope="module")
def template():
    return ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}({{ strftime_now('%Y') }}", {})


@pytest.fixture
def talking(one_row, three_rows, template, monkeypatch):
    """The engines, with a template."""
    for engine in (one_row, three_rows):
        model = engine.model
        object.__setattr__(model, "chat_template", template)
    yield one_row, three_rows
    for engine in (one_row, three_rows):
        object.__setattr__(engine.model, "chat_template", None)


def spec_of(prompts: Prompts, shard=UNSHARDED, seed: int = 0) -> JobSpec:
    assert is_openai(prompts)
    return JobSpec(prompts, SamplingParams(seed=seed), shard, is_openai=True, created=86400)


def write(folder: Path, lines: list[bytes]) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


def job(engine, lines: list[bytes], out: Path, **keywords) -> list[dict]:
    with Prompts(str(write(out.parent, lines))) as prompts:
        run_job(engine, spec_of(prompts, **keywords), out, fresh=True)
    return [json.loads(text) for text in out.read_bytes().splitlines()]


def test_answers_have_the_official_shape_and_the_bodies_choices(talking, tmp_path):
    one_row, _ = talking
    found = {entry["custom_id"]: entry for entry in job(one_row, some_lines(), tmp_path / "out.jsonl")}
    assert list(found) == [json.loads(text)["custom_id"] for text in some_lines()]
    for entry in found.values():
        assert list(entry) == ["id", "custom_id", "response", "error"]
        assert (entry["response"]["status_code"], entry["error"]) == (200, None)
        body = entry["response"]["body"]
        if entry["custom_id"] == "chat":
            assert ChatCompletion.model_validate(body).choices[0].message.content == body["choices"][0]["message"]["content"]
        elif entry["custom_id"] not in (
            "echo",
            "score",
            "scores",
        ):  # whose first log-probability is null, which the official type does not say
            Completion.model_validate(body)
        assert Completion.construct(**body).created == 86400
    several = found["several"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in several] == list(range(6))
    requests = [
        one_row.request(prompt, SamplingParams(max_tokens=6, temperature=1.0, seed=seed))
        for prompt, seed in [([1, 2, 3], 7), ([1, 2, 3], 8), ([4], 7), ([4], 8), ([1, 2, 3], 9), ([1, 2, 3], 10)]
    ]
    for choice, request in zip(several, requests, strict=True):
        (alone,) = one_row.run([request])
        assert tuple(choice["token_ids"]) == alone.token_ids
        assert choice["digest"] == alone.digest
    drawn = found["drawn"]["response"]["body"]
    assert drawn["seed"] == seed_of(0, "drawn")
    greedy = found["greedy"]["response"]["body"]["choices"][0]["logprobs"]
    assert greedy["token_logprobs"] == [max(top.values()) for top in greedy["top_logprobs"]]
    echo = found["echo"]["response"]["body"]["choices"][0]
    assert echo["text"].startswith("ab")
    assert (len(echo["logprobs"]["tokens"]), echo["logprobs"]["token_logprobs"][0]) == (8, None)


def test_bytes_are_the_same_in_any_batch_and_differ_for_ordinary_requests(talking, tmp_path):
    one_row, three_rows = talking
    outputs = {}
    for deterministic in (True, False):
        for engine in (one_row, three_rows):
            job(engine, some_lines(deterministic=deterministic), tmp_path / "out.jsonl")
            outputs.setdefault(deterministic, []).append((tmp_path / "out.jsonl").read_bytes())
    assert outputs[True][0] == outputs[True][1]
    assert outputs[False][0] != outputs[False][1]


def test_without_a_time_templates_get_no_clock(talking, tmp_path):
    one_row, _ = talking
    chats = [raw for raw in some_lines() if b'"messages"' in raw]
    out = tmp_path / "out.jsonl"
    with Prompts(str(write(tmp_path, chats))) as prompts:
        run_job(one_row, dataclasses.replace(spec_of(prompts), created=None), out)
    assert out.read_bytes() == b""
    (error,) = sibling(out, "errors").read_text().splitlines()
    assert "the template prints the date, and a job has none: give --created" in error


def test_outputs_of_another_max_len_belong_to_another_job(talking, tmp_path):
    """A chat that does not say how long its answer may be gets as many tokens as there is room for."""
    one_row, _ = talking
    with Prompts(str(write(tmp_path, some_lines()))) as prompts:
        header = job_header(one_row, spec_of(prompts))
    assert header["openai"] == {"created": 86400, "max_len": one_row.config.max_len}


def test_seed_of_the_job_decides_lines_without_their_own(talking, tmp_path):
    one_row, _ = talking
    first, second = (job(one_row, some_lines(), tmp_path / "out.jsonl", seed=seed) for seed in (0, 1))
    differing = [a["custom_id"] for a, b in zip(first, second, strict=True) if a != b]
    assert "drawn" in differing
    assert not {"several", "again"} & set(differing)


def test_bad_lines_are_answered_apart_and_change_nothing_else(talking, tmp_path):
    _, three_rows = talking
    good = job(three_rows, some_lines(), tmp_path / "out.jsonl")
    mixed = [*some_lines()[:3], *(raw for raw, _, _ in BAD_LINES), *some_lines()[3:]]
    assert job(three_rows, mixed, tmp_path / "out.jsonl") == good
    errors = [json.loads(text) for text in sibling(tmp_path / "out.jsonl", "errors").read_bytes().splitlines()]
    assert [entry["custom_id"] for entry in errors] == [custom_id for _, custom_id, _ in BAD_LINES]
    for entry, (_, _, param) in zip(errors, BAD_LINES, strict=True):
        if param is None:
            assert entry["response"] is None
            assert entry["error"]["code"] == "invalid_line"
        else:
            assert (entry["response"]["status_code"], entry["error"]) == (400, None)
            assert entry["response"]["body"]["error"]["param"] == param
    assert json.loads(sibling(tmp_path / "out.jsonl", "stats").read_text())["num_failed"] == len(BAD_LINES)
    job(three_rows, some_lines(), tmp_path / "out.jsonl")
    assert not sibling(tmp_path / "out.jsonl", "errors").exists()


def test_shards_and_workers_give_the_bytes_of_one_job(talking, tmp_path):
    _, three_rows = talking
    mixed = [*(raw for raw, _, _ in BAD_LINES[:8]), *some_lines(), *(raw for raw, _, _ in BAD_LINES[8:])]
    whole = tmp_path / "whole.jsonl"
    job(three_rows, mixed, whole)
    kinds = ("errors", "manifest")
    for name in ("shards.jsonl", "chunks.jsonl"):
        out = tmp_path / name
        with Prompts(str(tmp_path / "in.jsonl")) as prompts:
            if name == "shards.jsonl":
                for index in range(3):
                    run_job(three_rows, spec_of(prompts, (index, 3)), shard_path(out, index, 3))
                merge(out)
            else:
                run_worker(three_rows, spec_of(prompts), out, WorkerOptions(chunk_lines=2))
                merge(out)
        assert out.read_bytes() == whole.read_bytes()
        for kind in kinds:
            assert sibling(out, kind).read_bytes() == sibling(whole, kind).read_bytes()


def test_logits_that_are_not_finite_are_an_error_of_their_line(tmp_path):
    config = EngineConfig(max_requests=3, max_len=64, method="none", schedule=SCHEDULE)
    engine = Engine(without_tokenizer(broken_params(200)), config)
    lines = [line("sound", prompt=[1, 2], max_tokens=4), line("broken", prompt=[[3], [1, 2, 200]], max_tokens=4)]
    assert [entry["custom_id"] for entry in job(engine, lines, tmp_path / "out.jsonl")] == ["sound"]
    (error,) = map(json.loads, sibling(tmp_path / "out.jsonl", "errors").read_bytes().splitlines())
    assert (error["custom_id"], error["response"], error["error"]["code"]) == ("broken", None, "logits_not_finite")


def test_streamed_job_has_all_lines_in_order(talking, tmp_path):
    import io

    _, three_rows = talking
    lines = [*some_lines()[:2], BAD_LINES[0][0], some_lines()[2]]
    file = io.BytesIO()
    with Prompts(str(write(tmp_path, lines))) as prompts:
        result = stream_job(three_rows, spec_of(prompts), file)
    found = [json.loads(text)["custom_id"] for text in file.getvalue().splitlines()]
    assert found == ["greedy", "drawn", "hot", "several"]
    assert (result.num_failed, result.failed) == (1, ("hot",))


@pytest.mark.parametrize(
    ("defaults", "on_error", "said"),
    [
        (SamplingParams(temperature=0.5, top_k=3), "stop", "leave out the options for temperature, top_k"),
        (SamplingParams(), "reject", "leave --on-error out"),
    ],
)
def test_options_that_bodies_would_ignore_are_refused(one_row, tmp_path, defaults, on_error, said):
    with Prompts(str(write(tmp_path, some_lines()))) as prompts, pytest.raises(InputError, match=said):
        run_job(one_row, JobSpec(prompts, defaults, on_error=on_error, is_openai=True), tmp_path / "out.jsonl")


def test_format_is_that_of_the_first_line_with_an_id(tmp_path):
    own = b'{"id": "a", "prompt": "x"}'
    for lines, expected in [([own, some_lines()[0]], False), ([b"{", b"5", *some_lines()], True), ([b"{"], False)]:
        with Prompts(str(write(tmp_path, lines))) as prompts:
            assert is_openai(prompts) is expected


def test_scores_have_the_engines_bits_and_count_no_new_tokens(talking, tmp_path):
    one_row, three_rows = talking
    found = {entry["custom_id"]: entry["response"]["body"] for entry in job(three_rows, some_lines(), tmp_path / "out.jsonl")}
    prompts = [one_row.model.tokenizer.encode("def f(x):"), [1, 2, 3], list(range(40))]
    sampling = SamplingParams(logprobs=2, temperature=1.0, seed=seed_of(0, "score"))
    (alone,) = one_row.score(prompts[:1], 1, sampling)
    logprobs = found["score"]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, *alone.logprobs]
    assert found["score"]["choices"][0]["digest"] == alone.digest
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [
        len({token, *dict(top)}) for token, top in zip(alone.token_ids, alone.top_logprobs, strict=True)
    ]
    assert found["score"]["choices"][0]["text"] == "def f(x):"
    assert found["score"]["usage"] == {
        "prompt_tokens": len(prompts[0]),
        "completion_tokens": 0,
        "total_tokens": len(prompts[0]),
    }
    several = [choice["logprobs"]["token_logprobs"] for choice in found["scores"]["choices"]]
    assert several[1] == [None]
    for values, prompt in zip(several[::2], prompts[1:], strict=True):
        assert values == [None, *one_row.score([prompt], 1, SamplingParams())[0].logprobs]
    stats = json.loads(sibling(tmp_path / "out.jsonl", "stats").read_text())
    assert stats["num_tokens"] == sum(body["usage"]["completion_tokens"] for body in found.values())
    assert stats["num_failed"] == 0


@pytest.mark.parametrize("steps", [1, 3])
def test_job_that_was_stopped_among_scores_goes_on_to_the_same_bytes(talking, tmp_path, monkeypatch, steps):
    one_row, _ = talking
    lines = [some_lines()[6], *some_lines()]
    lines[0] = lines[0].replace(b'"score"', b'"first"')
    job(one_row, lines, tmp_path / "whole.jsonl")
    out = tmp_path / "out.jsonl"
    step = one_row.step
    left = iter([step] * steps)

    def stops(outbox=None):
        for each in left:
            return each(outbox)
        raise Stopped(15)

    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        with monkeypatch.context() as patch:
            patch.setattr(one_row, "step", stops)
            with pytest.raises(Unfinished):
                run_job(one_row, spec_of(prompts), out)
        assert not out.exists()
        result = run_job(one_row, spec_of(prompts), out)
    assert (result.stats["num_resumed"] > 0) == (steps > 1)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
