"""The server under load, with clients that leave and bodies that make no sense: no bit moves, nothing leaks."""

import asyncio
import concurrent.futures
import contextlib
import json
import random
import resource
import socket
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

from detspec.cli.serve import Tells
from detspec.engine import sequence
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.jobs.audit import run_audit_responses
from detspec.jobs.job import run_job
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.serve.app import UNEXPECTED
from detspec.serve.engine_thread import EngineThread
from detspec.serve.log import ResponseLog
from detspec.serve.metrics import Metrics
from detspec.serve.service import Service
from detspec.serve.streams import AnswerChunks
from tests.engine.fake_device import FakeDevice
from tests.serve.running import Running, chatting, choices, chunks_of, make_engine, serving

NUM = 48
NUM_LEAVING = 40


@pytest.fixture(scope="module")
def server(model):
    with serving(make_engine(model)) as running:
        yield running


def bodies(*, deterministic: bool = True) -> list[dict]:
    """Prompts of 1 to 30 tokens, some of which begin alike; greedy and sampled."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(0, 256, 20).tolist()
    made = []
    for i in range(NUM):
        prompt = [*(prefix if i % 3 == 0 else []), *rng.integers(0, 256, 1 + i % 10).tolist()]
        body = {"prompt": prompt, "max_tokens": 4 + (7 * i) % 20, "temperature": (0.0, 0.9)[i % 2], "seed": i, "logprobs": 0}
        made.append(body | {"return_token_ids": True, "is_deterministic": deterministic})
    return made


def streamed(server: Running, body: dict) -> str:
    """Joins the chunks of a stream, to the choices of a whole answer."""
    joined: dict = {}
    for chunk in chunks_of(server, body):
        (choice,) = chunk["choices"]
        if not joined:
            joined = choice
            continue
        joined["text"] += choice["text"]
        joined["token_ids"] += choice["token_ids"]
        for key, values in choice["logprobs"].items():
            joined["logprobs"][key] = None if values is None else joined["logprobs"][key] + values
        joined |= {key: value for key, value in choice.items() if key not in ("text", "logprobs", "token_ids")}
    return json.dumps([joined])


def at_once(ask, bodies: list[dict], width: int, order: list[int]) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(width) as threads:
        found = dict(zip(order, threads.map(lambda i: ask(bodies[i]), order), strict=True))
    return [found[i] for i in range(len(bodies))]


def test_equal_requests_have_equal_choices_at_any_load_streamed_or_not(server):
    asked = bodies()
    order = list(range(NUM))
    alone = at_once(lambda body: choices(server, body), asked, 1, order)
    shuffled = random.Random(0).sample(order, NUM)
    assert at_once(lambda body: choices(server, body), asked, 16, order) == alone
    assert at_once(lambda body: choices(server, body), asked, 5, shuffled) == alone

    def keys_sorted(texts: list[str]) -> list[str]:
        return [json.dumps(json.loads(text), sort_keys=True) for text in texts]

    assert keys_sorted(at_once(lambda body: streamed(server, body), asked, 8, shuffled)) == keys_sorted(alone)


def test_ordinary_requests_have_other_choices_somewhere(server):
    """The inverse control."""
    asked = bodies(deterministic=False)
    order = list(range(NUM))
    alone = at_once(lambda body: choices(server, body), asked, 1, order)
    assert any(at_once(lambda body: choices(server, body), asked, width, order) != alone for width in (16, 8, 3))


def leave(server: Running, seed: int) -> None:
    """Sends a body, or a part of it, reads nothing or a little, and goes."""
    rng = random.Random(seed)
    head, body = raw({"prompt": [seed % 256] * 20, "max_tokens": 40, "n": 3, "stream": bool(seed % 2)})
    with connected(server) as connection:
        connection.sendall((head + body)[: len(head) + len(body) - (rng.randrange(20) if seed % 5 == 0 else 0)])
        connection.settimeout(rng.random() * 0.1)
        with contextlib.suppress(TimeoutError):
            connection.recv(rng.randrange(1, 2000))


def read_slowly(server: Running, going: threading.Event) -> None:
    """Asks for a long stream, and reads some bytes now and then until it need not go on."""
    head, body = raw({"prompt": [9] * 10, "max_tokens": 50, "n": 8, "stream": True, "logprobs": 0})
    with connected(server) as connection:
        connection.sendall(head + body)
        while going.is_set() and connection.recv(16):
            time.sleep(0.02)


def raw(body: dict) -> tuple[bytes, bytes]:
    """Head and body of a completion as bytes on the wire."""
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content), content


def connected(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def memory_mb() -> float:
    """Memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def test_clients_that_leave_take_nothing_and_move_no_bit(server):
    asked = bodies()
    order = list(range(NUM))
    alone = at_once(lambda body: choices(server, body), asked, 4, order)
    rng = random.Random(1)
    leaving = [threading.Thread(target=leave, args=(server, seed)) for seed in range(NUM_LEAVING)]
    rng.shuffle(leaving)
    for thread in leaving:
        thread.start()
    assert at_once(lambda body: choices(server, body), asked, 4, order) == alone
    for thread in leaving:
        thread.join()
    server.wait_until_empty()
    assert server.engine.num_pages_held == 0
    assert server.engine.num_live == 0
    metrics = server.http.get("/metrics").text
    assert 'request_success_total{finished_reason="abort"}' in metrics


BAD = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"1",
    b'{"prompt": 5}',
    b'{"prompt": ""}',
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": [99999]}',
    b'{"prompt": [-1]}',
    b'{"prompt": "a", "max_tokens": "5"}',
    b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": "a", "max_tokens": 1e3}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "n": 100000}',
    b'{"prompt": "a", "seed": 9223372036854775808}',
    b'{"prompt": "a", "\\ud800": 1, "\\ud800": 2}',
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}',
    b'{"prompt": "a", "logit_bias": {"99999": 1}}',
    b'{"prompt": "a", "stream_options": {"x": 1}, "stream": true}',
    b'{"prompt": "a", "logprobs": 21}',
    b'{"prompt": "\\ud800"}',
    b'\xff\xfe{"prompt": "a"}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "' + b"a" * 70_000 + b'"}',
]


@pytest.mark.parametrize("place", range(len(BAD)))
def test_bad_bodies_are_refused_by_one_clear_error(server, place):
    answer = server.http.post("/v1/completions", content=BAD[place])
    assert answer.status_code == 400, (BAD[place][:80], answer.text)
    error = answer.json()["error"]
    assert len(error["message"]) > 10
    assert "Traceback" not in answer.text
    assert len(answer.text) < 2000


def damaged_answers(server: Running, number: int) -> set[int]:
    """The statuses of `number` bodies in which some bytes are changed; each is answered in JSON."""
    rng = random.Random(2)
    whole = json.dumps(bodies()[1]).encode()
    statuses = set()
    for _ in range(number):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        answer = server.http.post("/v1/completions", content=bytes(damaged))
        statuses.add(answer.status_code)
        assert "Traceback" not in answer.text
        answer.json()
    return statuses


def test_random_damage_never_breaks_the_server(server):
    assert damaged_answers(server, 200) == {200, 400}
    assert server.http.get("/health").status_code == 200


@pytest.mark.sweep
def test_thousands_who_leave_damage_or_read_slowly_leak_nothing(server):
    """Memory may grow until the first 200 have left: caches fill, and the allocator keeps what it had."""
    asked = bodies()
    order = list(range(NUM))
    alone = at_once(lambda body: choices(server, body), asked, 4, order)
    going = threading.Event()
    going.set()
    slow = [threading.Thread(target=read_slowly, args=(server, going)) for _ in range(6)]
    for thread in slow:
        thread.start()
    held = []
    for first in range(0, 1000, 100):
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            list(threads.map(lambda seed: leave(server, seed), range(first, first + 100)))
        assert damaged_answers(server, 100) == {200, 400}
        assert at_once(lambda body: choices(server, body), asked, 4, order) == alone
        held.append(memory_mb())
    going.clear()
    for thread in slow:
        thread.join()
    server.wait_until_empty()
    print(f"MB in memory after each hundred: {[round(mb) for mb in held]}")
    assert server.engine.num_pages_held == 0
    assert held[-1] - held[1] < 30


def test_wrong_paths_and_methods_are_answered_in_json(server):
    for answer in (server.http.get("/v1/none"), server.http.get("/v1/completions"), server.http.post("/pause")):
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["message"]


def test_calls_beyond_the_queue_are_told_to_come_again(model, tmp_path):
    with serving(make_engine(model), max_waiting=2, weights_dir=tmp_path) as server:
        answer = server.http.post("/v1/completions", json={"prompt": "a", "n": 11})
        assert answer.status_code == 400  # there is never room
        assert "11" in answer.json()["error"]["message"]
        server.ask("/pause?mode=wait")
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            full = threads.submit(server.ask, prompt="a", n=10, max_tokens=2)
            server.wait_until(lambda: server.service.thread.num_open == 10)
            answer = server.http.post("/v1/completions", json={"prompt": "a", "n": 2})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            server.ask("/resume")
            assert len(full.result()["choices"]) == 10
        server.wait_until_empty()


def test_large_bodies_and_missing_keys_are_refused(model):
    with serving(make_engine(model), max_body_bytes=1000, api_key="secret") as server:
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert server.http.get("/health").status_code == 200
        server.http.headers["authorization"] = "Bearer secret"
        assert server.http.post("/v1/completions", content=b"x" * 2000).status_code == 413
        assert len(server.ask(prompt="a", max_tokens=2)["choices"]) == 1


def test_any_error_in_a_stream_is_its_last_event(model, monkeypatch):
    def fails(self, update, place):
        raise ZeroDivisionError("of our own")

    with serving(make_engine(model)) as server:
        monkeypatch.setattr(AnswerChunks, "of", fails)
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 4, "stream": True}) as stream:
            (line,) = [line for line in stream.iter_lines() if line]
        assert json.loads(line.removeprefix("data: "))["error"]["message"] == UNEXPECTED
        server.wait_until_empty()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_request_that_fails_in_the_engine_is_500_with_an_id_of_the_log(server, monkeypatch, caplog, is_streamed):
    digest = sequence.completion_digest

    def fails(request, *rest):
        if request.sampling.seed == 4711:
            raise ZeroDivisionError("planted")
        return digest(request, *rest)

    body = {"prompt": "a", "max_tokens": 4, "temperature": 1.0, "seed": 5}
    before = choices(server, body)
    monkeypatch.setattr(sequence, "completion_digest", fails)
    failing = {**body, "seed": 4711, "stream": is_streamed}
    answer = server.http.post("/v1/completions", json=failing)
    assert answer.status_code == (200 if is_streamed else 500)
    last = answer.text.split("data: ")[-1] if is_streamed else answer.text
    message = json.loads(last)["error"]["message"]
    (record,) = [record for record in caplog.records if record.name == "detspec"]
    request_id = record.getMessage().split()[1]
    assert message == f"request {request_id} failed in the server, whose log says more under this id"
    assert record.exc_info[0] is ZeroDivisionError
    assert choices(server, body) == before
    server.wait_until_empty()
    assert server.engine.num_pages_held == 0


@pytest.mark.parametrize("number", [2**31, 2**63, 2048, -1])
@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_token_that_is_none_is_refused_by_the_fields_name(server, name, number):
    value = {str(number): 1} if name == "logit_bias" else [number]
    answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert len(server.ask(prompt="a", max_tokens=2)["choices"]) == 1


def test_error_on_arrival_ends_its_own_call_alone(model, monkeypatch):
    arrived = Service._arrived

    def fails(self, parsed, requests, update):
        if parsed.body.request_id == "bad":
            raise ZeroDivisionError("of our own")
        return arrived(self, parsed, requests, update)

    monkeypatch.setattr(Service, "_arrived", fails)
    with serving(make_engine(model)) as server, concurrent.futures.ThreadPoolExecutor(2) as threads:
        body = {"prompt": "a", "max_tokens": 4}
        bad = threads.submit(server.http.post, "/v1/completions", json={**body, "request_id": "bad"})
        good = threads.submit(server.ask, **body)
        assert (bad.result().status_code, len(good.result()["choices"])) == (500, 1)
        server.wait_until_empty()


def test_ready_comes_after_programs_are_prepared():
    events = []
    made = iter([True, True])
    engine = types.SimpleNamespace(prepare_behind=lambda: events.append("prepared"), has_work=False, stop=lambda: None)
    engine.go_on_preparing = lambda: next(made, False)

    async def run() -> None:
        thread = EngineThread(engine, max_waiting=1, metrics=Metrics())
        thread.on_ready = lambda: events.append(f"ready: {thread.is_ready}")
        thread.on_made = lambda: events.append("made")
        thread.start()
        while len(events) < 4:
            await asyncio.sleep(0.01)
        await thread.close()

    asyncio.run(run())
    assert events == ["prepared", "ready: False", "made", "made"]


def test_server_answers_while_further_programs_are_compiled_and_says_which():
    """On a device that counts up and compiles when it is told to."""
    device = FakeDevice(Schedule(), EngineConfig(max_requests=4, max_len=256, method="none"))
    with serving(Engine.over(device), waits=False) as server:
        labels = ["ordinary processing[1]", "1x1 processing[1]", "ordinary processing[4]", "likeliest tokens"]
        body = {"prompt": [1, 2], "max_tokens": 4, "return_token_ids": True}
        for is_deterministic in (True, False):
            answer = server.ask(**body, is_deterministic=is_deterministic)
            assert answer["choices"][0]["token_ids"] == [3, 4, 5, 6]
        assert server.http.get("/health").json() == {"status": "ready", "compiling": labels}
        assert "detspec:num_programs_compiling 4.0" in server.http.get("/metrics").text
        assert set(device.steps_of) == {"4x1 processing[4]"}
        server.wait_until(lambda: device.compiled() and server.engine.is_prepared)
        assert server.http.get("/health").json() == {"status": "ready", "compiling": []}
        assert "detspec:num_programs_compiling 0.0" in server.http.get("/metrics").text
        server.ask(**body)
        assert device.steps_of["1x1 processing[1]"] > 0


def test_server_goes_on_without_a_program_that_cannot_be_compiled_and_says_which(caplog, capsys):
    device = FakeDevice(Schedule(), EngineConfig(max_requests=4, max_len=256, method="none"))
    body = {"prompt": [1, 2], "max_tokens": 4, "return_token_ids": True}
    with serving(Engine.over(device), waits=False) as server:
        server.service.thread.on_made = Tells(server.engine).made
        device.compiled()
        server.wait_until(lambda: len(device.behind) == 2)
        device.behind[-1][1].set_exception(MemoryError("no room"))
        server.wait_until(lambda: device.compiled() and server.engine.is_prepared)
        health = server.http.get("/health")
        assert health.status_code == 200
        assert health.json() == {"status": "ready", "compiling": [], "failed": ["ordinary processing[1]"]}
        for is_deterministic in (True, False):
            answer = server.ask(**body, is_deterministic=is_deterministic)
            assert answer["choices"][0]["token_ids"] == [3, 4, 5, 6]
    assert "MemoryError: no room" in caplog.text
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == [
        "detspec: cannot be compiled or certified, requests go on without: ordinary processing[1]",
        "detspec: all other programs are compiled and certified",
    ]


def test_server_that_leaves_tries_nothing_more():
    device = FakeDevice(Schedule(), EngineConfig(max_requests=4, max_len=256, method="none"))
    with serving(Engine.over(device), waits=False, grace_s=0.5) as server:
        leaving(server)
        server.wait_until(lambda: server.service.thread.is_leaving)
        device.compiled()
        assert server.ask(prompt=[1, 2], max_tokens=4)["choices"]
        assert len(device.behind) == 1


def test_lazy_server_compiles_nothing_ahead_and_behind_what_was_lacked_for_long(monkeypatch):
    monkeypatch.setattr("detspec.engine.preparation.IMPROVED_AFTER", 20)
    device = FakeDevice(Schedule(), EngineConfig(max_requests=4, max_len=256, method="none"))
    with serving(Engine.over(device), prepares=False) as server:
        assert server.http.get("/health").json() == {"status": "ready", "compiling": []}
        assert server.engine.certificates == {}
        server.ask(prompt=[1, 2], max_tokens=4)
        assert [plan.label for plan in server.engine.certificates] == ["1x1[1]"]
        assert server.http.get("/health").json()["compiling"] == []
        server.ask(prompt=[1, 2], max_tokens=40)
        server.ask(prompt=[1, 2], max_tokens=4)
        assert server.http.get("/health").json()["compiling"] == ["ordinary[1]"]
        assert [plan.label for plan in server.engine.certificates] == ["1x1[1]"]  # nothing stood still for it
        server.wait_until(lambda: device.compiled() and server.engine.is_prepared)
        assert [plan.label for plan in server.engine.certificates] == ["1x1[1]", "ordinary[1]"]


def failing(model, monkeypatch, *, after: int):
    """An engine whose step fails after so many that brought news."""
    engine = make_engine(model, segment_steps=1)
    step = engine.step
    left = iter(range(after))

    def fails():
        updates = step()
        if updates and next(left, None) is None:
            raise ZeroDivisionError("no more")
        return updates

    monkeypatch.setattr(engine, "step", fails)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return engine


def test_engine_that_fails_ends_calls_streams_and_health(model, monkeypatch):
    with serving(failing(model, monkeypatch, after=3)) as server:
        ends = []
        server.service.thread.on_failure = lambda: ends.append(server.service.thread.failure.exit_code)
        assert server.http.get("/health").status_code == 200
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 40, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]  # it ends, and is whole HTTP
        assert len(lines) > 1
        assert "ZeroDivisionError" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        assert "data: [DONE]" not in lines
        assert server.http.get("/health").status_code == 500
        answer = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, "ZeroDivisionError" in answer.text) == (500, True)
        assert ends == [1]


def test_calls_that_wait_for_their_whole_answer_are_told_that_the_engine_failed(model, monkeypatch):
    with serving(failing(model, monkeypatch, after=0)) as server:
        answer = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, "the engine has ended: ZeroDivisionError" in answer.text) == (500, True)


def leaving(server: Running) -> None:
    server.service.is_leaving = lambda: True


@pytest.mark.slow
def test_what_is_in_flight_when_the_time_is_over_is_aborted_and_answered(model, tmp_path):
    log = tmp_path / "log.jsonl"
    body = {"prompt": [5, 17, 9], "seed": 1, "max_tokens": 60, "temperature": 0.9, "n": 8, "ignore_eos": True}
    with serving(make_engine(model, segment_steps=1), log=log, grace_s=0.0) as server:
        whole = {choice["index"]: choice["text"] for choice in server.ask(**body)["choices"]}
        step = server.engine.step
        server.engine.step = lambda: (time.sleep(0.05), step())[1]  # of the 60 steps few are over when the time is
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            plain = threads.submit(server.ask, **body)
            stream = threads.submit(streamed, server, {**body, "n": 1, "logprobs": 0, "return_token_ids": True})
            while server.engine.num_live < 8:
                pass
            leaving(server)
            choices = plain.result()["choices"]
            (last,) = json.loads(stream.result())
    assert {choice["finish_reason"] for choice in choices} == {"abort"} == {last["finish_reason"]}
    assert all(whole[choice["index"]].startswith(choice["text"]) for choice in choices)
    assert whole[0].startswith(last["text"])
    assert run_audit_responses(chatting(model), log, max_requests=8).num_records == 8  # those that were not aborted


def test_calls_that_a_pause_keeps_end_when_the_time_is_over(model, tmp_path):
    body = {"prompt": [5, 17, 9], "seed": 1, "max_tokens": 60, "ignore_eos": True}
    with serving(make_engine(model, segment_steps=1), weights_dir=tmp_path, grace_s=0.0) as server:
        server.ask("/pause?mode=keep")
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(server.http.post, "/v1/completions", json=body)
            while not server.service.thread.num_open:
                pass
            leaving(server)
            answer = waiting.result()
        assert (answer.status_code, "ended before the call began" in answer.text) == (500, True)


def test_engine_that_does_not_answer_holds_up_no_end(model, monkeypatch):
    """As one that compiles for minutes."""
    monkeypatch.setattr("detspec.serve.service.ABORT_S", 0.0)
    monkeypatch.setattr("detspec.serve.engine_thread.CLOSE_S", 0.1)
    compiled = threading.Event()
    engine = make_engine(model)
    step = engine.step
    engine.step = lambda: (compiled.wait(), step())[1]
    with serving(engine, grace_s=0.0) as server, concurrent.futures.ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.http.post, "/v1/completions", json={"prompt": "a"})
        while not server.service.thread.num_open:
            pass
        leaving(server)
        assert waiting.result().status_code == 500
    compiled.set()  # the server has ended before


SCORES = (
    {"prompt": "a b", "logprobs": 1},
    {"prompt": [[1, 2, 3], [4], list(range(30))], "logprobs": 0},
    {"prompt": list(range(20)), "temperature": 0.5, "logprobs_mode": "tempered", "logprobs": 3},
    {"prompt": list(range(20)), "top_k": 2, "logprobs_mode": "processed", "logprobs": 2},  # most are minus infinity
)


@pytest.mark.slow
def test_log_of_a_server_is_audited_and_a_change_is_found(model, tmp_path):
    log = tmp_path / "log.jsonl"
    with serving(make_engine(model), log=log) as logged:
        for body in bodies()[:6]:
            logged.ask(**{**body, "n": 2, "logprobs": 1})
        answers = [logged.ask(**body, max_tokens=0, echo=True) for body in SCORES]
    whole = run_audit_responses(chatting(model), log, max_requests=8)
    assert (whole.num_records, whole.differences) == (18, [])
    lines = log.read_text().splitlines()
    records = [json.loads(line) for line in lines[1:]]
    logged_digests = sorted(record["record"]["digest"] for record in records[12:])  # texts of one call end in any order
    assert logged_digests == sorted(choice["digest"] for answer in answers for choice in answer["choices"])

    def changed(number: int, change) -> list:
        record = json.loads(lines[number])
        change(record)
        log.write_text("\n".join([*lines[:number], json.dumps(record), *lines[number + 1 :], '{"cut off']))
        return run_audit_responses(chatting(model), log, max_requests=8).differences

    def next_bit(line: dict, place: int = 1) -> None:
        values = line["record"]["logprobs"]
        values[place] = float(np.nextafter(np.float32(values[place]), np.float32(0)))

    (found,) = changed(5, next_bit)
    assert found.position == 1
    (score,) = (n for n, record in enumerate(records, start=1) if len(record.get("given_token_ids", ())) == 29)
    (infinite,) = (n for n, record in enumerate(records, start=1) if None in record["record"]["logprobs"])
    (found,) = changed(score, lambda line: next_bit(line, 7))
    assert (found.position, "log-probability: recorded" in found.what) == (7, True)
    (found,) = changed(score, lambda line: line["record"]["token_ids"].__setitem__(3, 0))
    assert found.what.startswith("token: recorded 0")
    (found,) = changed(score, lambda line: line["given_token_ids"].__setitem__(3, 0))  # then the answer was to something else
    assert found.position in (2, 3)
    (found,) = changed(score, lambda line: line["record"].update(finish_reason="length"))
    assert found.what == "finish_reason: recorded 'length', canonical 'given'"
    place = records[infinite - 1]["record"]["logprobs"].index(None)
    (found,) = changed(infinite, lambda line: line["record"]["logprobs"].__setitem__(place, -1.0))
    assert found.position == place


@pytest.mark.slow
def test_log_goes_on_after_its_last_whole_line_and_is_for_one_server(model, tmp_path):
    log = tmp_path / "log.jsonl"
    with serving(make_engine(model), log=log) as server:
        server.ask(prompt="a", max_tokens=2)
        with pytest.raises(InputError, match="in use"):
            ResponseLog(log, server.engine)
    kept = log.read_bytes()
    log.write_bytes(kept + b'{"prompt_token_ids": [1')  # as a server leaves it that is killed
    with serving(make_engine(model), log=log) as server:
        server.ask(prompt="b", max_tokens=2)
    assert log.read_bytes().startswith(kept + b'{"fingerprint"')
    assert run_audit_responses(chatting(model), log, max_requests=8).num_records == 2
    for other in (b"a letter", b'{"id": 1}\n', b"\n"):
        (tmp_path / "other").write_bytes(other)
        with pytest.raises(InputError, match="something else than a server's log"):
            ResponseLog(tmp_path / "other", make_engine(model))
        assert (tmp_path / "other").read_bytes() == other


@contextlib.contextmanager
def files_of_at_most(num_bytes: int):
    """As a full disk, but for the number of the error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_ends_the_server_and_what_is_answered_is_in_the_log(model, tmp_path):
    log = tmp_path / "log.jsonl"
    with serving(make_engine(model), log=log) as server:
        server.ask(prompt=[[1], [2]], max_tokens=2)
        thread = server.service.thread
        codes = []
        thread.on_failure = lambda: codes.append(thread.failure.exit_code)
        whole = log.read_bytes()
        with files_of_at_most(len(whole) + 100):  # a part of a line fits
            answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 500
        assert f"cannot write --log {log}: " in answer.json()["error"]["message"]
        assert log.read_bytes() == whole
        assert codes == [3]
        assert server.http.get("/health").status_code == 500
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 500  # though there is room again
        body = {"prompt": "a", "stream": True}
        assert server.http.post("/v1/completions", json=body).status_code == 500
    assert log.read_bytes() == whole
    assert run_audit_responses(chatting(model), log, max_requests=8).num_records == 2


def test_stream_ends_with_an_error_when_its_end_cannot_be_logged(model, tmp_path):
    log = tmp_path / "log.jsonl"
    with serving(make_engine(model, segment_steps=1), log=log) as server:
        with files_of_at_most(log.stat().st_size):
            answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9, "stream": True})
        assert answer.status_code == 200
        *_, last = answer.text.strip().splitlines()
        assert "cannot write --log" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert log.read_bytes().count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_log_that_is_full_from_the_start_is_one_error(model):
    with pytest.raises(InputError, match="--log /dev/full: No space left on device"):
        ResponseLog(Path("/dev/full"), make_engine(model))


def test_batch_job_scores_with_the_bits_of_the_server(server, model, tmp_path):
    asked = [{**body, "max_tokens": 0, "echo": True, "seed": 1} for body in SCORES]
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(asked)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        run_job(make_engine(model), JobSpec(prompts, SamplingParams(), is_openai=True), tmp_path / "out.jsonl")
    found = [json.loads(line)["response"]["body"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    answers = at_once(lambda body: server.ask(**body), asked, 4, list(range(len(asked))))
    for body, answer in zip(found, answers, strict=True):
        same = {"model": "", "created": 0}
        assert json.dumps(body | same) == json.dumps(answer | same)
    assert found[0]["choices"] != server.ask(**{**asked[0], "prompt": "a c"})["choices"]
