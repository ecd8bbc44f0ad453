"""The HTTP side of the server: routes, their description, what becomes of a message."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from blockcompact_jax.protocol import Abort, Ack

from . import wire
from .errors import Refusal, RemoteRefusedError
from .gate import Gate
from .service import VerifierService
from .service_metrics import ServiceMetrics

OPEN_PATHS = frozenset({"/v1/health", "/openapi.json"})
"""What needs no token."""
_ERRORS: dict[int | str, dict[str, Any]] = {
    refusal.http_status: {"model": wire.ErrorAnswer} for refusal in Refusal
}
_SCHEMA_PLACE = "#/components/schemas/{model}"
_BEARER = "HTTPBearer"

Message = TypeVar("Message", bound=BaseModel)


def create_app(service: VerifierService, *, token: str) -> FastAPI:
    """Returns the application of a server.

    Args:
        service: What answers.
        token: Bearer token that every message must carry, except to `OPEN_PATHS`.
    """
    metrics = ServiceMetrics(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        reaper = asyncio.create_task(_release_lost(service, metrics))
        yield
        reaper.cancel()
        with suppress(asyncio.CancelledError):
            await reaper
        await service.close()

    app = FastAPI(title="blockcompact verifier", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(RemoteRefusedError, _refused)
    messages = _Messages(app)
    _add_routes(messages, service)

    @app.get("/v1/health", responses={413: {"model": wire.ErrorAnswer}})
    async def health() -> wire.HealthAnswer:
        return wire.HealthAnswer(
            process_epoch=service.process_epoch,
            num_requests=service.num_requests,
            num_leases=service.num_leases,
            shared_bytes=service.allowance.used_bytes,
        )

    @app.get("/metrics", responses=_ERRORS, openapi_extra={"security": [{_BEARER: []}]})
    async def get_metrics() -> Response:
        return Response(metrics.as_text(), media_type="text/plain; version=0.0.4")

    messages.describe()
    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    app.add_middleware(
        Gate, token=token, paths=paths, open_paths=OPEN_PATHS, count=metrics.count_message
    )
    return app


async def _release_lost(service: VerifierService, metrics: ServiceMetrics) -> None:
    while True:
        await asyncio.sleep(service.limits.lease_seconds / 4)
        metrics.lost.inc(await service.release_lost())


async def _refused(_: Request, error: Exception) -> JSONResponse:
    refusal = error.refusal if isinstance(error, RemoteRefusedError) else Refusal.BAD_MESSAGE
    content = {"refusal": refusal.value, "message": str(error)}
    return JSONResponse(content, status_code=refusal.http_status)


class _Messages:
    """Adds the messages to an application, and describes their bodies in its OpenAPI schema.

    A body is parsed and checked by pydantic in one pass over its bytes; FastAPI, left to do it,
    takes several times as long for it as the service for its answer.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._models: list[type[BaseModel]] = []

    def add(
        self,
        name: str,
        model: type[Message],
        answer: type[BaseModel],
        handle: Callable[[Message], Awaitable[BaseModel]],
    ) -> None:
        """Adds `POST /v1/{name}`.

        Args:
            name: The message's name.
            model: Its body.
            answer: What it is answered with.
            handle: Answers it.
        """

        async def endpoint(request: Request) -> Response:
            message = _parse(model, await request.body())
            answered = await handle(message)
            return Response(answered.model_dump_json(), media_type="application/json")

        schema = {"$ref": _SCHEMA_PLACE.format(model=model.__name__)}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        self._app.add_api_route(
            f"/v1/{name}",
            endpoint,
            methods=["POST"],
            operation_id=name,
            response_model=answer,
            responses=_ERRORS,
            openapi_extra={"requestBody": body, "security": [{_BEARER: []}]},
        )
        self._models.append(model)

    def describe(self) -> None:
        """Has the application's OpenAPI schema define the bodies and the bearer token."""
        describe_routes = self._app.openapi

        def openapi() -> dict[str, Any]:
            schema = describe_routes()
            modes: Any = [(model, "validation") for model in self._models]
            _, bodies = models_json_schema(modes, ref_template=_SCHEMA_PLACE)
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(bodies["$defs"])
            components["securitySchemes"] = {_BEARER: {"type": "http", "scheme": "bearer"}}
            return schema

        self._app.openapi = openapi


def _parse(model: type[Message], body: bytes) -> Message:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(["body", *(str(part)[:100] for part in first["loc"])])
        raise RemoteRefusedError(Refusal.BAD_MESSAGE, f"`{name}`: {first['msg']}.") from error


def _add_routes(messages: _Messages, service: VerifierService) -> None:
    async def initialize(message: wire.InitializeWire) -> wire.InitializeAnswer:
        agreement = service.initialize(message.to_message())
        return wire.InitializeAnswer(
            process_epoch=service.process_epoch,
            source_kind=agreement.source_kind,
            max_copy_blocks=service.limits.max_copy_blocks,
            lease_seconds=service.limits.lease_seconds,
        )

    async def prefill(message: wire.PrefillWire) -> wire.PrefillAnswer:
        handle = await service.prefill(message.to_message())
        return wire.PrefillAnswer(
            num_tokens=len(message.token_ids), segment=wire.SegmentWire.of(handle)
        )

    async def verify(message: wire.VerifyWire) -> wire.VerifyAnswer:
        return wire.VerifyAnswer(num_tokens=await service.verify(message.to_message()))

    async def compaction_upload(message: wire.CompactionUploadWire) -> wire.UploadAnswer:
        return wire.UploadAnswer(num_packed_blocks=await service.upload(message.to_message()))

    async def ack(message: wire.AckWire) -> wire.DoneAnswer:
        done = await service.end_operation(Ack(key=message.key.to_message()))
        return wire.DoneAnswer(is_repeated=done)

    async def abort(message: wire.AbortWire) -> wire.DoneAnswer:
        done = await service.end_operation(
            Abort(key=message.key.to_message(), reason=message.reason)
        )
        return wire.DoneAnswer(is_repeated=done)

    async def finish(message: wire.FinishWire) -> wire.DoneAnswer:
        return wire.DoneAnswer(is_repeated=await service.finish(message.to_message()))

    async def heartbeat(message: wire.FinishWire) -> wire.DoneAnswer:
        service.heartbeat(message.to_message())
        return wire.DoneAnswer(is_repeated=False)

    add = messages.add
    add("initialize", wire.InitializeWire, wire.InitializeAnswer, initialize)
    add("prefill", wire.PrefillWire, wire.PrefillAnswer, prefill)
    add("verify", wire.VerifyWire, wire.VerifyAnswer, verify)
    add("compaction_upload", wire.CompactionUploadWire, wire.UploadAnswer, compaction_upload)
    add("ack", wire.AckWire, wire.DoneAnswer, ack)
    add("abort", wire.AbortWire, wire.DoneAnswer, abort)
    add("finish", wire.FinishWire, wire.DoneAnswer, finish)
    add("heartbeat", wire.FinishWire, wire.DoneAnswer, heartbeat)
