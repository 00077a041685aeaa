"""The routes of the server: what is read of a call, and how it is answered."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.openai.bodies import parse_chat, parse_completion
from detspec.openai.fields import BodyError
from detspec.openai.responses import answer_body, error_body
from detspec.serve.calls import CallFailed, ClientLeft, EngineStopped, HttpCall, QueueFull
from detspec.serve.control import control_routes
from detspec.serve.http import answer, error, read_json
from detspec.serve.service import ParseFn, Service
from detspec.serve.streams import event, events
from detspec.serve.token_ids import ids_body, parse_ids
from detspec.serve.tokens import token_routes

GENERATING = {"/v1/completions": parse_completion, "/v1/chat/completions": parse_chat, "/inference/v1/generate": parse_ids}
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

    async def models(request: Request) -> Response:
        return answer({"object": "list", "data": [service.card]})

    async def model(request: Request) -> Response:
        service.check_name(request.path_params["name"])
        return answer(service.card)

    routes = [
        *(Route(path, functools.partial(generated, service, parser), methods=["POST"]) for path, parser in GENERATING.items()),
        Route("/v1/models", models),
        Route("/v1/models/", models),
        Route("/v1/models/{name:path}", model),  # names may have slashes
        *token_routes(service),
        *control_routes(service),
    ]
    handlers = dict.fromkeys((InputError, QueueFull, EngineStopped, CallFailed, HTTPException, Exception), refusal)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.add_middleware(KeyCheck, key=service.options.api_key)
    return app


async def generated(service: Service, parser: ParseFn, request: Request) -> Response:
    """The answer to a call whose body `parser` reads, whole or as a stream."""
    parsed = await service.parse(parser, *await read_json(request, service.options.max_body_bytes))
    call = service.begin(parsed)
    as_ids = parser is parse_ids
    if parsed.body.stream:
        return EventStream(service, call, events(parsed, call, as_ids=as_ids))
    found: dict[tuple[int, int], Completion] = {}
    try:
        with watching(service, call, request.receive):
            async for arrived in call.updates():
                if arrived.update.completion is not None:
                    found[arrived.place, arrived.update.completion.index] = arrived.update.completion
    except ClientLeft:
        return Response(status_code=499)
    return answer((ids_body if as_ids else answer_body)(parsed, [found[place] for place in sorted(found)], arrived.answerer))


@contextlib.contextmanager
def watching(service: Service, call: HttpCall, receive: Receive) -> Iterator[None]:
    """Meanwhile, `call` ends with `ClientLeft` once its client disconnects; afterwards, what is open of it is aborted."""

    async def end_with_client() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        service.thread.abort(call)  # it may have news to read until it finds that it has ended
        call.fail(ClientLeft())

    watch = asyncio.ensure_future(end_with_client())
    try:
        yield
    finally:
        watch.cancel()
        service.thread.abort(call)


class EventStream(Response):
    """Server-sent events, until they end or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, call: HttpCall, content: AsyncIterator[bytes]) -> None:
        """`content` yields whole events of the `call`, of which nothing is left open at the end."""
        self._service = service
        self._call = call
        self._content = content
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them; an error after the first is sent as an event."""
        with watching(self._service, self._call, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with contextlib.aclosing(self._content):  # type: ignore[type-var]  # it is a generator
                    async for part in self._content:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
            except ClientLeft:
                return
            except Exception as failed:
                await send({"type": "http.response.body", "body": event(error(reason(failed), "server_error"))})
                if not isinstance(failed, EngineStopped | CallFailed):
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


async def refusal(request: Request, failed: Exception) -> Response:
    """The answer to a call that has `failed`."""
    if isinstance(failed, InputError):
        refused = failed if isinstance(failed, BodyError) else BodyError(str(failed))
        return answer(error_body(refused), status=404 if refused.code == "model_not_found" else 400)
    if isinstance(failed, QueueFull):
        return answer(error(str(failed), "rate_limit_error"), status=429, headers={"retry-after": RETRY_AFTER_S})
    if isinstance(failed, HTTPException):
        return answer(error(failed.detail, "invalid_request_error"), status=failed.status_code, headers=failed.headers or {})
    return answer(error(reason(failed), "server_error"), status=500)


def reason(failed: Exception) -> str:
    """Says why a call got no answer, as far as clients may know."""
    return str(failed) if isinstance(failed, EngineStopped | CallFailed) else UNEXPECTED
