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
