"""The routes of the server: what is read of a call, and how it is answered."""

import asyncio
import contextlib
import dataclasses
import hmac
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.openai.fields import BodyError
from detspec.openai.responses import chat_body, completion_body, error_body
from detspec.serve.control import control_routes
from detspec.serve.engine_thread import Call, ClientLeft, EngineStopped, EngineThread, QueueFull, Refused, RequestFailed
from detspec.serve.http import answer, error, read_json
from detspec.serve.service import Service
from detspec.serve.streams import Chunks, events
from detspec.serve.token_ids import IdChunks, completion_of, ids_body
from detspec.serve.tokens import token_routes

BODIES = {"completion": completion_body, "chat": chat_body, "token_ids": ids_body}
CHUNKS = {"completion": Chunks, "chat": Chunks, "token_ids": IdChunks}
RETRY_AFTER_S = "1"
UNEXPECTED = "something went wrong in the server; its log says more"


def make_app(service: Service) -> Starlette:
    """The application; its lifespan starts and ends the engine's thread."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.thread.start()
        late = asyncio.create_task(service.abort_late())
        try:
            yield
        finally:
            late.cancel()
            await service.thread.close()
            service.close()

    async def completions(request: Request) -> Response:
        body = await read_json(request, service.options.max_body_bytes)
        return await generated(service, "completion", body, request)

    async def chat(request: Request) -> Response:
        body = await read_json(request, service.options.max_body_bytes)
        return await generated(service, "chat", body, request)

    async def from_ids(request: Request) -> Response:
        body, num_bytes = await read_json(request, service.options.max_body_bytes)
        return await generated(service, "token_ids", (completion_of(body), num_bytes), request)

    async def models(request: Request) -> Response:
        return answer({"object": "list", "data": [service.card]})

    async def model(request: Request) -> Response:
        service.check_name(request.path_params["name"])
        return answer(service.card)

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/", models),
        Route("/v1/models/{name:path}", model),  # names may have slashes
        Route("/inference/v1/generate", from_ids, methods=["POST"]),
        *token_routes(service),
        *control_routes(service),
    ]
    handlers = {
        InputError: _refused,
        QueueFull: _full,
        EngineStopped: _broken,
        Refused: _broken,
        RequestFailed: _broken,
        HTTPException: _http_error,
        Exception: _unexpected,
    }
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.add_middleware(KeyCheck, key=service.options.api_key)
    return app


async def generated(service: Service, kind: str, body: tuple[Any, int], request: Request) -> Response:
    """The answer to a `body` of so many bytes, whole or as a stream."""
    parsed = await service.parse(kind, *body)
    call = service.begin(parsed)
    if parsed.stream:
        return EventStream(service.thread, call, events(parsed, call, CHUNKS[kind]))
    found: dict[tuple[int, int], Completion] = {}
    try:
        with service.thread.watching(call, request.receive):
            async for arrived in call.updates():
                if arrived.update.completion is not None:
                    found[arrived.place, arrived.update.completion.index] = arrived.update.completion
    except ClientLeft:
        return Response(status_code=499)
    return answer(BODIES[kind](parsed, [found[place] for place in sorted(found)], arrived.answerer))


class EventStream(Response):
    """Server-sent events, until they end or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, thread: EngineThread, call: Call, content: AsyncIterator[bytes]) -> None:
        """`content` yields whole events of the `call`, of which nothing is left open at the end."""
        self._thread = thread
        self._call = call
        self._content = content
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them; an error after the first is sent as an event."""
        with self._thread.watching(self._call, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with contextlib.aclosing(self._content):  # type: ignore[type-var]  # it is a generator
                    async for part in self._content:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
            except ClientLeft:
                return
            except Exception as failed:
                is_expected = isinstance(failed, EngineStopped | Refused | RequestFailed)
                why = str(failed) if is_expected else UNEXPECTED
                body = b"data: " + msgspec.json.encode(error(why, "server_error")) + b"\n\n"
                await send({"type": "http.response.body", "body": body})
                if not is_expected:
                    raise
                return
            await send({"type": "http.response.body", "body": b""})


@dataclasses.dataclass(frozen=True)
class KeyCheck:
    """Refuses calls without the bearer token, but to `/health`; in front of everything else."""

    app: Any
    key: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401, or hands the call on."""
        if scope["type"] == "http" and self.key is not None and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self.key.encode()):
                refusal = error("the API key is missing or wrong: send it as a bearer token", "authentication_error")
                await answer(refusal, status=401, headers={"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _refused(request: Request, failed: Exception) -> Response:
    if not isinstance(failed, BodyError):
        failed = BodyError(str(failed))
    return answer(error_body(failed), status=404 if failed.code == "model_not_found" else 400)


async def _full(request: Request, failed: Exception) -> Response:
    return answer(error(str(failed), "rate_limit_error"), status=429, headers={"retry-after": RETRY_AFTER_S})


async def _broken(request: Request, failed: Exception) -> Response:
    return answer(error(str(failed), "server_error"), status=500)


async def _http_error(request: Request, failed: Exception) -> Response:
    assert isinstance(failed, HTTPException)
    return answer(error(failed.detail, "invalid_request_error"), status=failed.status_code, headers=dict(failed.headers or {}))


async def _unexpected(request: Request, failed: Exception) -> Response:
    return answer(error(UNEXPECTED, "server_error"), status=500)
