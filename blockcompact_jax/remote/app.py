"""The HTTP side of the server: routes, bearer token, size limit, metrics."""

# pyright: reportUnusedFunction=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from blockcompact_jax.protocol import Abort, Ack

from . import wire
from .errors import Refusal, RemoteRefusedError
from .service import VerifierService

MAX_BODY_BYTES = 64 << 20
_ERRORS: dict[int | str, dict[str, Any]] = {400: {"model": wire.ErrorAnswer}}
_ERRORS.update({refusal.http_status: {"model": wire.ErrorAnswer} for refusal in Refusal})


class _Metrics:
    def __init__(self, service: VerifierService) -> None:
        self.registry = CollectorRegistry()
        self.messages = Counter(
            "blockcompact_messages",
            "Messages answered.",
            ["path", "status"],
            registry=self.registry,
        )
        self.lost = Counter(
            "blockcompact_lost_clients", "Requests released in silence.", registry=self.registry
        )
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "requests": ("Open requests.", lambda: service.num_requests),
            "leases": ("Operations whose sources are held.", lambda: service.num_leases),
            "shared_bytes": ("Shared memory in use.", lambda: service.allowance.used_bytes),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"blockcompact_{name}", text, registry=self.registry).set_function(read)


def create_app(service: VerifierService, *, token: str) -> FastAPI:
    """Returns the application of a server.

    Args:
        service: What answers.
        token: Bearer token that every message but `health` must carry.
    """
    metrics = _Metrics(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        reaper = asyncio.create_task(_release_lost(service, metrics))
        yield
        reaper.cancel()
        with suppress(asyncio.CancelledError):
            await reaper
        await service.close()

    app = FastAPI(title="blockcompact verifier", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_error_answers(app)
    known: set[str] = set()  # Metrics name no path that a stranger made up.
    _add_limits(app, metrics, known)
    guarded: Any = {"dependencies": [Depends(_bearer(token))], "responses": _ERRORS}
    _add_routes(app, service, guarded)

    @app.get("/metrics", **guarded)
    async def get_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    known.update(str(getattr(route, "path", "")) for route in app.routes)
    return app


async def _release_lost(service: VerifierService, metrics: _Metrics) -> None:
    while True:
        await asyncio.sleep(service.limits.lease_seconds / 4)
        metrics.lost.inc(await service.release_lost())


def _bearer(token: str) -> Callable[..., Awaitable[None]]:
    scheme = HTTPBearer(auto_error=False)

    async def check(given: HTTPAuthorizationCredentials | None = Depends(scheme)) -> None:  # noqa: B008
        found = given.credentials.encode() if given else b""
        if not hmac.compare_digest(found, token.encode()):
            raise RemoteRefusedError(
                Refusal.UNAUTHORIZED, "The bearer token is missing or wrong; give `--token-file`."
            )

    return check


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(RemoteRefusedError)
    async def refused(_: Request, error: Exception) -> JSONResponse:
        refusal = error.refusal if isinstance(error, RemoteRefusedError) else Refusal.BAD_MESSAGE
        content = {"refusal": refusal.value, "message": str(error)}
        return JSONResponse(content, status_code=refusal.http_status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: Exception) -> JSONResponse:
        problems: Any = error.errors() if isinstance(error, RequestValidationError) else []
        first: Any = problems[0] if problems else {"loc": (), "msg": "cannot be read"}
        name = ".".join(str(part)[:100] for part in first["loc"])
        content = {"refusal": Refusal.BAD_MESSAGE.value, "message": f"`{name}`: {first['msg']}."}
        return JSONResponse(content, status_code=Refusal.BAD_MESSAGE.http_status)


def _add_limits(app: FastAPI, metrics: _Metrics, known: set[str]) -> None:
    """Refuses large bodies before they are read, counts every message."""

    class Limits:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await self._inner(scope, receive, send)
                return
            headers = dict(scope["headers"])
            length: bytes = headers.get(b"content-length", b"0")
            is_chunked = b"transfer-encoding" in headers
            if is_chunked or not length.isdigit() or int(length) > MAX_BODY_BYTES:
                message = f"The body needs a `content-length` of at most {MAX_BODY_BYTES} bytes."
                answer = JSONResponse(
                    {"refusal": Refusal.TOO_LARGE.value, "message": message}, status_code=413
                )
                await answer(scope, receive, send)
                return
            path: str = scope["path"] if scope["path"] in known else "other"

            async def count(event: Any) -> None:
                if event["type"] == "http.response.start":
                    metrics.messages.labels(path, str(event["status"])).inc()
                await send(event)

            await self._inner(scope, receive, count)

    app.add_middleware(Limits)


def _add_routes(app: FastAPI, service: VerifierService, guarded: Any) -> None:
    @app.get("/v1/health", responses={413: {"model": wire.ErrorAnswer}})
    async def health() -> wire.HealthAnswer:
        return wire.HealthAnswer(
            process_epoch=service.process_epoch,
            num_requests=service.num_requests,
            num_leases=service.num_leases,
            shared_bytes=service.allowance.used_bytes,
        )

    @app.post("/v1/initialize", **guarded)
    async def initialize(message: wire.InitializeWire) -> wire.InitializeAnswer:
        agreement = service.initialize(message.to_message())
        return wire.InitializeAnswer(
            process_epoch=service.process_epoch,
            source_kind=agreement.source_kind,
            max_copy_blocks=service.limits.max_copy_blocks,
            lease_seconds=service.limits.lease_seconds,
        )

    @app.post("/v1/prefill", **guarded)
    async def prefill(message: wire.PrefillWire) -> wire.PrefillAnswer:
        handle = await service.prefill(message.to_message())
        return wire.PrefillAnswer(
            num_tokens=len(message.token_ids), segment=wire.SegmentWire.of(handle)
        )

    @app.post("/v1/verify", **guarded)
    async def verify(message: wire.VerifyWire) -> wire.VerifyAnswer:
        return wire.VerifyAnswer(num_tokens=await service.verify(message.to_message()))

    @app.post("/v1/compaction_upload", **guarded)
    async def compaction_upload(message: wire.CompactionUploadWire) -> wire.UploadAnswer:
        return wire.UploadAnswer(num_packed_blocks=await service.upload(message.to_message()))

    @app.post("/v1/ack", **guarded)
    async def ack(message: wire.AckWire) -> wire.DoneAnswer:
        done = await service.end_operation(Ack(key=message.key.to_message()))
        return wire.DoneAnswer(is_repeated=done)

    @app.post("/v1/abort", **guarded)
    async def abort(message: wire.AbortWire) -> wire.DoneAnswer:
        done = await service.end_operation(
            Abort(key=message.key.to_message(), reason=message.reason)
        )
        return wire.DoneAnswer(is_repeated=done)

    @app.post("/v1/finish", **guarded)
    async def finish(message: wire.FinishWire) -> wire.DoneAnswer:
        return wire.DoneAnswer(is_repeated=await service.finish(message.to_message()))

    @app.post("/v1/heartbeat", **guarded)
    async def heartbeat(message: wire.FinishWire) -> wire.DoneAnswer:
        service.heartbeat(message.to_message())
        return wire.DoneAnswer(is_repeated=False)
