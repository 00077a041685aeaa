"""A server in this process, for clients in this process."""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import uvicorn

from detspec.checkpoint.chat import ChatTemplate
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.serve.app import make_app
from detspec.serve.service import Options, Service
from tests.engine.byte_model import MAX_LEN, SCHEDULE

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


@dataclasses.dataclass
class Running:
    """A server that answers."""

    service: Service
    url: str
    http: httpx2.Client

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def ask(self, path: str = "/v1/completions", /, **body) -> dict:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait_until_empty(self) -> None:
        self.wait_until(lambda: not self.service.thread.num_open and not self.engine.has_work)

    def wait_until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.002)


def choices(server: Running, body: dict) -> str:
    """All choices of the answer, as text."""
    return json.dumps(server.ask(**body)["choices"])


def chunks_of(server: Running, body: dict) -> list[dict]:
    """The chunks of a stream."""
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def chatting(model: Model) -> Model:
    return dataclasses.replace(model, chat_template=ChatTemplate(TEMPLATE, {}))


def make_engine(model: Model, **changes) -> Engine:
    """In the shape of `tests.engine.byte_model.make_engine` for eight sequences, without drafts."""
    shape = {"max_requests": 8, "max_len": MAX_LEN, "method": "none", "num_speculative_tokens": 3, "schedule": SCHEDULE}
    return Engine(chatting(model), EngineConfig(**{**shape, **changes}))


@contextlib.contextmanager
def serving(engine: Engine, *, log: Path | None = None, waits: bool = True, **options) -> Iterator[Running]:
    """A server that answers; if it `waits`, all programs are there, so that ordinary requests run by plans of their own."""
    if waits and options.get("prepares", True):
        engine.prepare()  # several at a time, where a server compiles one after the other
        engine.device.compile_replays = lambda: engine.device.compile_behind(())  # few tests need these
    service = Service(engine, Options(name="bytes", log=log, **options))
    config = uvicorn.Config(
        make_app(service), port=0, log_level="critical", lifespan="on", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    sock = config.bind_socket()
    sock.listen(config.backlog)  # else clients that come before the server does are refused
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        with httpx2.Client(base_url=url, timeout=120) as http:
            while (health := http.get("/health")).status_code == 503 or (waits and health.json().get("compiling")):
                time.sleep(0.02)
            yield Running(service, url, http)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
