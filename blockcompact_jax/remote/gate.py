"""What every message passes before anything of its body is read: size, bearer token, count."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import JSONResponse

from .errors import Refusal

MAX_BODY_BYTES: Final = 64 << 20


class Gate:
    """ASGI middleware that refuses large bodies and strangers, and counts every message."""

    def __init__(
        self,
        inner: Any,
        *,
        token: str,
        paths: Collection[str],
        open_paths: Collection[str],
        count: Callable[[str, int], None],
    ) -> None:
        """Wraps an application.

        Args:
            inner: The application.
            token: The bearer token.
            paths: Paths that exist; others are counted as one, so that strangers make up none.
            open_paths: Paths that need no token.
            count: Told path and status of every answer.
        """
        self._inner = inner
        self._expected = b"bearer " + token.encode()
        self._paths = paths
        self._open_paths = open_paths
        self._count = count

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Lets a message in, or refuses it."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        path: str = scope["path"] if scope["path"] in self._paths else "other"

        is_answered = False

        async def counted(event: Any) -> None:
            nonlocal is_answered
            if event["type"] == "http.response.start":
                is_answered = True
                self._count(path, event["status"])
            await send(event)

        refused = self._refusal(path, dict(scope["headers"]))
        try:
            await (refused or self._inner)(scope, receive, counted)
        except Exception:
            if not is_answered:  # Starlette answers around all middleware.
                self._count(path, HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> JSONResponse | None:
        length = headers.get(b"content-length", b"0")
        is_chunked = b"transfer-encoding" in headers
        if is_chunked or not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return _answer(
                Refusal.TOO_LARGE,
                f"The body needs a `content-length` of at most {MAX_BODY_BYTES} bytes.",
            )
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        found = scheme.lower() + b" " + given.strip()
        if path not in self._open_paths and not hmac.compare_digest(found, self._expected):
            return _answer(
                Refusal.UNAUTHORIZED, "The bearer token is missing or wrong; give `--token-file`."
            )
        return None


def _answer(refusal: Refusal, message: str) -> JSONResponse:
    return JSONResponse(
        {"refusal": refusal.value, "message": message}, status_code=refusal.http_status
    )
