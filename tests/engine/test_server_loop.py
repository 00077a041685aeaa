"""A loop as a server runs it: one thread steps, others add, stream, abort and go away at random times."""

import dataclasses
import queue
import random
import threading

import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.engine.request import Request
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import facts

NUM = 300
NUM_CLIENTS = 6
PREFIX = list(range(100, 135))  # two pages and 3 tokens


def traffic(*, deterministic: bool) -> list[Request]:
    rng = np.random.default_rng(0)
    requests = []
    for i in range(NUM):
        prompt = rng.integers(0, 2048, int(rng.integers(1, 20))).tolist()
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 16)),
            temperature=(0.0, 0.8)[i % 2],
            top_p=(1.0, 0.9)[i % 3 == 0],
            seed=i,
            stop_token_ids=(7, 8, 9) if i % 5 == 0 else (),
            logit_bias={7: 4.0, 8: 4.0, 9: 4.0} if i % 5 == 0 else {},
            deterministic=deterministic,
        )
        requests.append(Request(str(i), tuple(PREFIX + prompt[:5] if i % 4 == 0 else prompt), sampling))
    return requests


class Server:
    """A thread that steps an engine, and a mailbox for each request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.mailboxes: dict[str, queue.SimpleQueue] = {}
        self.closing = threading.Event()
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self.loop)

    def loop(self) -> None:
        try:
            while not self.closing.is_set() or self.engine.has_work:
                for update in self.engine.step():
                    self.mailboxes[update.request.id].put(update)
        except BaseException as error:
            self.errors.append(error)

    def ask(self, request: Request, *, stream: bool) -> queue.SimpleQueue:
        self.mailboxes[request.id] = queue.SimpleQueue()
        self.engine.add(request, stream=stream)
        return self.mailboxes[request.id]


def client(server: Server, requests: list[Request], seed: int, found: dict[str, tuple]) -> None:
    """Asks its requests a few at a time; some are streamed, some aborted after their first tokens, some never listened to."""
    rng = random.Random(seed)
    for i in range(0, len(requests), 5):
        asked = [(request, rng.random(), None) for request in requests[i : i + 5]]
        asked = [(request, kind, server.ask(request, stream=kind < 0.4)) for request, kind, _ in asked]
        for request, kind, mailbox in asked:
            if kind > 0.95:
                continue  # went away
            tokens: tuple[int, ...] = ()
            while True:
                update = mailbox.get(timeout=300)
                tokens += update.token_ids
                if update.completion is not None:
                    break
                if kind < 0.1:
                    server.engine.abort(request.id)
            assert tokens == update.completion.token_ids
            found[request.id] = facts(update.completion)


def serve(engine: Engine, requests: list[Request]) -> dict[str, tuple]:
    server, found = Server(engine), {}
    clients = [threading.Thread(target=client, args=(server, requests[c::NUM_CLIENTS], c, found)) for c in range(NUM_CLIENTS)]
    server.thread.start()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(timeout=300)
    server.closing.set()
    server.thread.join(timeout=300)
    assert server.errors == []
    assert engine.num_pages_held == 0
    assert not engine.has_work
    return found


def compared(found: dict[str, tuple], expected: dict[str, tuple]) -> list[bool]:
    """Whether each request has the bits of `expected`; those that were aborted, as far as they came."""
    same = []
    for id, (tokens, logprobs, reason) in found.items():
        whole = expected[id]
        if reason == "abort":
            same.append(tokens == whole[0][: len(tokens)] and logprobs == whole[1][: len(logprobs)])
        else:
            same.append((tokens, logprobs, reason) == whole)
    return same


@pytest.mark.slow
def test_every_answer_of_a_server_has_the_bits_of_generate_and_ordinary_ones_do_not(
    three_rows: Engine, one_row: Engine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("detspec.engine.preparation.IMPROVED_AFTER", 10**9)  # the first plans are enough
    requests = traffic(deterministic=True)
    expected = {c.id: facts(c) for c in one_row.run(requests)}
    found = serve(three_rows, requests)
    assert len(found) > 0.9 * NUM
    assert any(reason == "abort" for _, _, reason in found.values())
    assert all(compared(found, expected))

    ordinary = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, deterministic=False)) for r in requests]
    assert not all(compared(serve(three_rows, ordinary), expected))


def test_stream_that_is_aborted_while_it_has_news_ends_once(three_rows):
    three_rows.add(Request("a", (5, 17, 9), SamplingParams(max_tokens=40)), stream=True)
    three_rows.step()
    three_rows.step()
    three_rows.abort("a")
    updates = [update for _ in iter(lambda: three_rows.has_work, False) for update in three_rows.step()]
    assert [update.completion.finish_reason for update in updates if update.completion is not None] == ["abort"]
