"""Clients that each keep a connection open and ask for one whole answer after the other, in a process of their own.

    python -m scripts.serving.clients PORT < bodies.json

Prints the seconds that they took by the clock, and those of their own processor time, as JSON. They cost little, because they
share the machine with the server: they read no more of an answer than its status and its length.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator

CLIENTS = 32
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


def main() -> int:
    """Asks, and prints."""
    requests = [_request(json.dumps(body).encode()) for body in json.load(sys.stdin)]
    began, cpu_began = time.perf_counter(), time.process_time()
    asyncio.run(_ask_all(int(sys.argv[1]), iter(requests)))
    print(json.dumps([time.perf_counter() - began, time.process_time() - cpu_began]))
    return 0


def _request(content: bytes) -> bytes:
    lines = "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"
    return "\r\n".join((*lines, f"Content-Length: {len(content)}", "", "")).encode() + content


async def _ask_all(port: int, requests: Iterator[bytes]) -> None:
    """Each client takes the next of `requests` when it has got an answer."""

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in requests:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = LENGTH.search(head)
            body = await reader.readexactly(int(length[1])) if length else b""
            if not head.startswith(b"HTTP/1.1 200 ") or not body:
                raise SystemExit(f"a request failed: {head.decode()}{body.decode()}")
        writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


if __name__ == "__main__":
    raise SystemExit(main())
