"""A completion over HTTP, with the time of each piece; a client that costs little next to a server on two cores.

Pieces are chunks of HTTP's chunked encoding, which hold whole server-sent events. `http.client` would block, and libraries
that do all of HTTP take a tenth of a core at a thousand pieces a second.
"""

import asyncio
import dataclasses
import json
import time
from typing import Any

PREFIX = b"data: "
DONE = b"[DONE]"


@dataclasses.dataclass
class Answer:
    """Answer to a request, times in seconds of `time.perf_counter`.

    Attributes:
        began: when it was sent.
        times: when each piece with tokens came.
        choices: the choices of all pieces, without their texts' ends cut.
        num_tokens: tokens that the server counted.
        error: why it failed; "" if it did not.
    """

    began: float
    times: list[float] = dataclasses.field(default_factory=list)
    choices: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    error: str = ""
    ended: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.began

    @property
    def e2e_s(self) -> float:
        """Seconds to the end."""
        return self.ended - self.began

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first."""
        return (self.times[-1] - self.times[0]) / max(1, self.num_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def facts(self) -> str:
        """Everything in the answer but its times, for comparing bits: texts, log-probabilities, ends and digests."""
        joined: dict[str, Any] = {}
        for choice in self.choices:
            for key, value in choice.items():
                if key == "text":
                    joined[key] = joined.get(key, "") + value
                elif key == "logprobs":
                    joined.setdefault(key, []).extend((value or {}).get("token_logprobs", []))
                elif value is not None:
                    joined[key] = value
        return json.dumps(joined, sort_keys=True)


async def complete(host: str, port: int, path: str, body: dict[str, Any]) -> Answer:
    """Sends `body` and reads the answer to its end: a stream, unless the body says `"stream": False`."""
    streams = {"stream": True, "stream_options": {"include_usage": True}} if body.get("stream", True) else {}
    content = json.dumps({**body, **streams}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    answer = Answer(time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(head.encode() + b"Connection: close\r\n\r\n" + content)
            await _read(reader, answer)
        finally:
            writer.close()
    except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
        answer.error = repr(error)
    answer.ended = time.perf_counter()
    if not answer.times and not answer.error:
        answer.error = "no token came"
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    """Reads the answer's head and pieces."""
    status = (await reader.readline()).split()
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    if status[1:2] != [b"200"]:
        answer.error = f"{b' '.join(status).decode()}: {(await reader.read(2000)).decode(errors='replace')}"
        return
    if headers.get(b"transfer-encoding") != b"chunked":
        content = await reader.readexactly(int(headers[b"content-length"]))
        _take(json.loads(content), answer, time.perf_counter())
        return
    while size := int(await reader.readline(), 16):
        piece = (await reader.readexactly(size + 2))[:-2]
        now = time.perf_counter()
        for event in piece.split(b"\n\n"):
            if event.startswith(PREFIX) and not event.endswith(DONE):
                _take(json.loads(event.removeprefix(PREFIX)), answer, now)


def _take(chunk: dict[str, Any], answer: Answer, now: float) -> None:
    if "error" in chunk:
        answer.error = chunk["error"]["message"]
    if chunk.get("usage"):
        answer.num_tokens = chunk["usage"]["completion_tokens"]
    answer.choices += chunk.get("choices", [])
    if chunk.get("choices"):
        answer.times.append(now)
