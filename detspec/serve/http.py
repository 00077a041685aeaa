"""Bodies in and out: JSON that is read within a limit, and written."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from detspec.errors import InputError
from detspec.openai.fields import BodyError
from detspec.read_json import RepeatedKey, parse_json

LONG_BODY = 1 << 16  # bytes of a body from which on another thread reads it, and splits its texts into tokens


async def read_json(request: Request, most_bytes: int) -> tuple[Any, int]:
    """The JSON value in the body of `request`, and how many bytes it has.

    Raises `BodyError` for what `parse_json` refuses, about the key if one comes twice, and `HTTPException` 413 for more than
    `most_bytes`.
    """
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > most_bytes:
                raise HTTPException(413, f"the body has more than {most_bytes} bytes: send less, or start the server with more")
            parts.append(part)
    except ClientDisconnect as error:
        raise HTTPException(400, "the client left before the body had come") from error
    try:
        return await off_loop(num_bytes, lambda: parse_json(b"".join(parts))), num_bytes
    except InputError as error:
        raise BodyError(f"the body {error}", error.key if isinstance(error, RepeatedKey) else None) from error


async def off_loop(num_bytes: int, work: Callable[[], Any]) -> Any:
    """Does `work`, in another thread if a body of so many bytes could take it long."""
    return work() if num_bytes < LONG_BODY else await asyncio.to_thread(work)


def answer(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON."""
    return Response(msgspec.json.encode(content), status, dict(headers or {}), "application/json")


def error(message: str, kind: str) -> dict[str, Any]:
    """The body of an error that is no fault of a field."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
