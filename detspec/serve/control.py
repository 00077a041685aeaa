"""Routes for those who run the server: health, counts, fingerprint; and for trainers, who pause it and change its weights."""

import importlib.metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from detspec.errors import InputError
from detspec.openai.fields import BodyError, read_fields
from detspec.serve.engine_thread import PAUSE_MODES
from detspec.serve.http import answer, error, read_json
from detspec.serve.service import Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class WeightsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/update_weights`."""

    path: str | None = None
    weight_version: str | None = None


def control_routes(service: Service) -> list[BaseRoute]:
    """`/health`, `/metrics`, `/version` and `/fingerprint`; with a folder of weights, those for trainers too."""
    thread = service.thread

    async def health(request: Request) -> Response:
        if thread.failure is not None:
            return answer({"status": "failed"}, status=500)
        if not thread.is_ready:
            return answer({"status": "certifying"}, status=503)
        failed = {"failed": service.engine.not_made} if service.engine.not_made else {}
        return answer({"status": "ready", "compiling": service.engine.compiling, **failed})

    async def metrics(request: Request) -> Response:
        engine = service.engine
        usage = engine.num_pages_held / engine.num_pages
        num_compiling = len(engine.compiling)
        page = service.metrics.page(
            num_running=engine.num_live, num_waiting=thread.num_waiting, cache_usage=usage, num_compiling=num_compiling
        )
        return Response(page, media_type=METRICS_TYPE)

    async def version(request: Request) -> Response:
        return answer({"version": importlib.metadata.version("detspec")})

    async def fingerprint(request: Request) -> Response:
        return answer({"system_fingerprint": service.answerer.system_fingerprint, "fingerprint": service.answerer.facts})

    routes: list[BaseRoute] = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/fingerprint", fingerprint),
    ]
    return routes if service.options.weights_dir is None else [*routes, *trainer_routes(service)]


def trainer_routes(service: Service) -> list[BaseRoute]:
    """`/pause`, `/resume`, `/is_paused`, `/update_weights` and `/weight_info`."""
    thread = service.thread

    async def pause(request: Request) -> Response:
        mode = request.query_params.get("mode", PAUSE_MODES[0])
        if mode not in PAUSE_MODES:
            raise BodyError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", "mode")
        await thread.pause(mode)
        return answer({"is_paused": thread.is_paused})

    async def resume(request: Request) -> Response:
        thread.resume()
        return answer({"is_paused": False})

    async def is_paused(request: Request) -> Response:
        return answer({"is_paused": thread.is_paused})

    async def update_weights(request: Request) -> Response:
        value, _ = await read_json(request, service.options.max_body_bytes)
        body = read_fields(value, WeightsBody)
        if body.path is None:
            raise BodyError("the body needs a path: the name of a folder in that of --weights-dir", "path")
        try:
            await service.update_weights(body.path, body.weight_version)
        except InputError as failed:
            return answer(error(str(failed), "invalid_request_error"), status=400)
        return answer(weights())

    async def weight_info(request: Request) -> Response:
        return answer(weights())

    def weights() -> dict[str, object]:
        answerer = service.answerer
        return {
            "weight_version": answerer.facts.get("weight_version"),
            "model": answerer.facts["model"],
            "system_fingerprint": answerer.system_fingerprint,
        }

    return [
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/is_paused", is_paused),
        Route("/update_weights", update_weights, methods=["POST"]),
        Route("/weight_info", weight_info),
    ]
