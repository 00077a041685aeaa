"""A trainer pauses the server and changes its weights: answers, names and logs are those of the weights they come from."""

import asyncio
import concurrent.futures
import json
import types
from pathlib import Path

import jax
import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import load
from detspec.jobs.audit import run_audit_responses
from detspec.model.params import init_params
from detspec.openai.bodies import parse_completion
from detspec.serve.streams import DONE, events
from tests.engine.byte_model import BYTE_CFG, byte_params, write_folder
from tests.serve.running import chatting, choices, chunks_of, make_engine, serving

PAGE = Path(__file__).parents[2] / "docs" / "rl_trainers.md"


@pytest.mark.slow
def test_trainer_pauses_changes_weights_and_goes_on(model, tmp_path):
    write_folder(tmp_path / "first")
    write_folder(tmp_path / "second", init_params(BYTE_CFG, jax.random.key(2)))
    body = {"prompt": [5, 17, 9], "seed": 1, "max_tokens": 8, "logprobs": 0}
    with serving(make_engine(model), weights_dir=tmp_path, log=tmp_path / "log.jsonl") as server:
        before = server.ask(**body)
        for bad in ("../first", "/etc", "none", "first/", "..", "a" * 300):
            answer = server.http.post("/update_weights", json={"path": bad})
            assert (answer.status_code, "no folder of weights" in answer.text) == (400, True)
        assert server.ask("/pause?mode=wait") == {"is_paused": True}
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            waiting = threads.submit(server.ask, **body)
            stream = threads.submit(chunks_of, server, body)
            named = {"prompt": [5, 17, 9], "max_tokens": 8, "return_weight_versions": True, "stream": True}
            spans = threads.submit(chunks_of, server, named)
            server.wait_until(lambda: server.service.thread.num_open == 3)
            assert server.ask("/update_weights", path="second", weight_version="step 2")["weight_version"] == "step 2"
            assert not waiting.done()
            server.ask("/resume")
            second = waiting.result()
        assert {chunk["system_fingerprint"] for chunk in stream.result()} == {second["system_fingerprint"]}
        assert "".join(chunk["choices"][0]["text"] for chunk in stream.result()) == second["choices"][0]["text"]
        assert spans.result()[-1]["choices"][0]["weight_versions"] == [{"start": 0, "end": 8, "version": "step 2"}]
        assert second["choices"] != before["choices"]
        assert second["system_fingerprint"] != before["system_fingerprint"]
        server.ask("/update_weights", path="first")
        after = server.ask(**body)
        assert {**after, "created": 0} == {**before, "created": 0}
        server.wait_until_empty()
    report = run_audit_responses(chatting(load(tmp_path / "first")), tmp_path / "log.jsonl", max_requests=8)
    assert (report.num_records, report.differences, report.num_other_weights) == (2, [], 3)
    assert digest_model(BYTE_CFG, byte_params()) == load(tmp_path / "first").digest


def test_client_of_the_page_publishes_rolls_out_and_scores(model, tmp_path):
    source = PAGE.read_text(encoding="utf-8").partition("## Over HTTP")[2].partition("```python\n")[2].partition("```")[0]
    page = vars(types.ModuleType("page"))
    exec(compile(source, PAGE.name, "exec"), page)
    write_folder(tmp_path / "step-0")
    write_folder(tmp_path / "step-1", init_params(BYTE_CFG, jax.random.key(2)))
    prompts = [[5, 17, 9], [1, 2, 3, 4]]
    with serving(make_engine(model), weights_dir=tmp_path) as running:
        server = page["Server"](running.url)
        asked = {"samples": 3, "step": 0, "max_tokens": 8, "temperature": 1.0}
        first = server.rollouts(prompts, **asked)
        assert [len(group) for group in first] == [3, 3]
        for prompt, group in zip(prompts, first, strict=True):
            assert len({tuple(sample["token_ids"]) for sample in group}) == 3
            assert server.score(prompt + group[0]["token_ids"])[len(prompt) :] == group[0]["logprobs"]
        named = server.publish("step-1", "step 1")
        second = server.rollouts(prompts, **asked)
        assert named["weight_version"] == "step 1"
        assert {sample["system_fingerprint"] for group in second for sample in group} == {named["system_fingerprint"]}
        assert all(a["logprobs"] != b["logprobs"] for a, b in zip(first[0], second[0], strict=True))
        server.publish("step-0", None)
        again = server.rollouts(prompts, **asked)
        assert [texts_of(group) for group in again] == [texts_of(group) for group in first]
        other_step = server.rollouts(prompts, **{**asked, "step": 1})
        assert [texts_of(group) for group in other_step] != [texts_of(group) for group in first]


def texts_of(group: list[dict]) -> list[tuple[list[int], list[float]]]:
    return [(sample["token_ids"], sample["logprobs"]) for sample in group]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "integer"])
def test_model_in_int8_or_of_integers_takes_new_weights_in_its_own_dtype(weights, tmp_path):
    write_folder(tmp_path / "first")
    write_folder(tmp_path / "second", init_params(BYTE_CFG, jax.random.key(2)))
    body = {"prompt": [5, 17, 9], "seed": 1, "max_tokens": 8, "logprobs": 0}
    rounded = {name: load(tmp_path / name, weights=weights) for name in ("first", "second")}
    changes = {"schedule": None} if weights == "integer" else {}
    with serving(make_engine(rounded["second"], **changes)) as server:
        expected = server.ask(**body)
    with serving(make_engine(rounded["first"], **changes), weights_dir=tmp_path) as server:
        before = server.ask(**body)
        server.ask("/update_weights", path="second")
        after = server.ask(**body)
    assert after["choices"] == expected["choices"] != before["choices"]
    assert after["system_fingerprint"] == expected["system_fingerprint"]


@pytest.mark.slow
def test_what_is_read_late_has_the_name_and_the_log_of_its_own_weights(model, tmp_path):
    """A client that reads slowly may still be reading when weights change."""
    write_folder(tmp_path / "first")
    write_folder(tmp_path / "second", init_params(BYTE_CFG, jax.random.key(2)))
    body = {"prompt": [5, 17, 9], "seed": 1, "max_tokens": 8, "logprobs": 0, "return_weight_versions": True}
    with serving(make_engine(model), weights_dir=tmp_path, log=tmp_path / "log.jsonl") as server:
        before = server.ask(**body)
        thread = server.service.thread

        async def read_late() -> list[bytes]:
            parsed = await server.service.parse(parse_completion, {**body, "stream": True}, 0)
            call = server.service.begin(parsed)
            while thread.num_open:
                await asyncio.sleep(0.01)
            await server.service.update_weights("second", "step 2")
            return [part async for part in events(parsed, call, as_ids=False)]

        *_, last, done = asyncio.run_coroutine_threadsafe(read_late(), thread.loop).result(60)
        assert done == DONE
        chunk = json.loads(last.removeprefix(b"data: "))
        assert chunk["system_fingerprint"] == before["system_fingerprint"] != server.ask(**body)["system_fingerprint"]
        assert chunk["choices"][0]["weight_versions"] == before["choices"][0]["weight_versions"]
    report = run_audit_responses(chatting(load(tmp_path / "first")), tmp_path / "log.jsonl", max_requests=8)
    assert (report.num_records, report.differences, report.num_other_weights) == (2, [], 1)


def test_pause_ends_when_another_call_resumes(model, tmp_path):
    with serving(make_engine(model, segment_steps=1), weights_dir=tmp_path) as server:
        thread = server.service.thread

        async def pause_and_resume() -> bool:
            pausing = asyncio.ensure_future(thread.pause("wait"))
            await asyncio.sleep(0)
            thread.resume()
            await thread.pause("keep")  # at once, before the first looks
            await asyncio.wait_for(pausing, 60)
            return thread.is_paused

        thread.num_open += 1  # it is never quiet
        assert asyncio.run_coroutine_threadsafe(pause_and_resume(), thread.loop).result(60)
        thread.num_open -= 1
        thread.loop.call_soon_threadsafe(thread.resume)
        assert len(server.ask(prompt="a", max_tokens=2)["choices"]) == 1


def test_pause_can_keep_or_abort_what_is_in_flight(model, tmp_path):
    body = {"prompt": [5, 17, 9], "seed": 1, "max_tokens": 50, "logprobs": 0, "temperature": 0.9}
    log = tmp_path / "log.jsonl"
    with serving(make_engine(model, segment_steps=1), weights_dir=tmp_path, log=log) as server:
        alone = choices(server, body)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            kept = threads.submit(choices, server, body)
            while not server.engine.num_live:
                pass
            server.ask("/pause?mode=keep")
            answer = server.http.post("/update_weights", json={"path": "x"})
            assert answer.status_code == (409 if not kept.done() else 400)
            server.ask("/resume")
            assert kept.result() == alone
            asked = {"n": 8, "echo": True, "logprobs": 1, "prompt_logprobs": 1}  # nothing that was asked can be had
            aborted = threads.submit(choices, server, {**body, **asked})
            while not server.engine.num_live:
                pass
            server.ask("/pause?mode=abort")
            ends = {choice["finish_reason"] for choice in json.loads(aborted.result())}
            assert ends & {"abort"}
            server.ask("/resume")
        assert choices(server, body) == alone
    assert run_audit_responses(chatting(model), log, max_requests=8).differences == []  # what was aborted is not in it
