"""The server under load, with clients that leave, bodies that make no sense, and a trainer: no bit moves, nothing leaks."""

import concurrent.futures
import contextlib
import json
import random
import resource
import socket
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import load
from detspec.jobs.audit_responses import run_audit_responses
from detspec.model.params import init_params
from tests.engine.byte_model import BYTE_CFG, byte_params, write_folder
from tests.serve.running import Running, chatting, make_engine, serving

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


def choices(server: Running, body: dict) -> str:
    """All choices of the answer, as text."""
    return json.dumps(server.ask(**body)["choices"])


def streamed(server: Running, body: dict) -> str:
    """What the chunks of a stream join to, as the choices of a whole answer."""
    joined: dict = {}
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
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
    """What this process holds in memory."""
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
    b'{"prompt": "a", "seed": -1}',
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


def test_calls_beyond_the_queue_are_told_to_come_again(model):
    with serving(make_engine(model), max_waiting=2) as server:
        answer = server.http.post("/v1/completions", json={"prompt": "a", "n": 11})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "11" in answer.json()["error"]["message"]
        assert len(server.ask(prompt="a", n=10, max_tokens=2)["choices"]) == 10
        server.wait_until_empty()


def test_large_bodies_and_missing_keys_are_refused(model):
    with serving(make_engine(model), max_body_bytes=1000, api_key="secret") as server:
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert server.http.get("/health").status_code == 200
        server.http.headers["authorization"] = "Bearer secret"
        assert server.http.post("/v1/completions", content=b"x" * 2000).status_code == 413
        assert len(server.ask(prompt="a", max_tokens=2)["choices"]) == 1


def test_trainer_pauses_changes_weights_and_goes_on(model, tmp_path):
    write_folder(tmp_path / "first")
    write_folder(tmp_path / "second", init_params(BYTE_CFG, jax.random.key(2)))
    body = {"prompt": [5, 17, 9], "seed": 1, "max_tokens": 8, "logprobs": 0}
    with serving(make_engine(model), weights_dir=tmp_path, log=tmp_path / "log.jsonl") as server:
        before = server.ask(**body)
        for bad in ("../first", "/etc", "none", "first/", ".."):
            answer = server.http.post("/update_weights", json={"path": bad})
            assert (answer.status_code, "no folder of weights" in answer.text) == (400, True)
        assert server.ask("/pause?mode=wait") == {"is_paused": True}
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(server.ask, **body)
            assert server.ask("/update_weights", path="second", weight_version="step 2")["weight_version"] == "step 2"
            assert not waiting.done()
            server.ask("/resume")
            second = waiting.result()
        assert second["choices"] != before["choices"]
        assert second["system_fingerprint"] != before["system_fingerprint"]
        server.ask("/update_weights", path="first")
        after = server.ask(**body)
        assert {**after, "created": 0} == {**before, "created": 0}
        server.wait_until_empty()
    report = run_audit_responses(chatting(load(tmp_path / "first")), tmp_path / "log.jsonl", max_requests=8)
    assert (report.num_records, report.differences, report.num_other_weights) == (2, [], 1)
    assert digest_model(BYTE_CFG, byte_params()) == load(tmp_path / "first").digest


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
            aborted = threads.submit(choices, server, {**body, "n": 8})
            while not server.engine.num_live:
                pass
            server.ask("/pause?mode=abort")
            ends = {choice["finish_reason"] for choice in json.loads(aborted.result())}
            assert ends & {"abort"}
            server.ask("/resume")
        assert choices(server, body) == alone
    assert run_audit_responses(chatting(model), log, max_requests=8).differences == []  # what was aborted is not in it


def test_engine_that_fails_ends_calls_and_health(model, monkeypatch):
    engine = make_engine(model)
    with serving(engine) as server:
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        answer = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, "ZeroDivisionError" in answer.text) == (500, True)
        assert server.http.get("/health").status_code == 500
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 500


def test_log_of_a_server_is_audited_and_a_change_is_found(server, model, tmp_path):
    log = tmp_path / "log.jsonl"
    with serving(make_engine(model), log=log) as logged:
        for body in bodies()[:6]:
            logged.ask(**{**body, "n": 2, "logprobs": 1})
        logged.ask(prompt="a b", max_tokens=0, echo=True)
    whole = run_audit_responses(chatting(model), log, max_requests=8)
    assert (whole.num_records, whole.differences) == (12, [])
    lines = log.read_text().splitlines()
    changed = json.loads(lines[5])
    changed["record"]["logprobs"][1] = float(np.nextafter(np.float32(changed["record"]["logprobs"][1]), np.float32(0)))
    log.write_text("\n".join([*lines[:5], json.dumps(changed), *lines[6:], '{"cut off']))
    (found,) = run_audit_responses(chatting(model), log, max_requests=8).differences
    assert found.position == 1
