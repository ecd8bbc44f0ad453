"""Serves the page on the loopback interface, with the standard library."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from blockcompact_jax.errors import CompactionError

_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost"})


def _said(error: Exception) -> str:
    name = "" if isinstance(error, CompactionError) else f"{type(error).__name__}: "
    return f"{name}{error}"


def serve_page(build: Callable[[], str], *, port: int) -> ThreadingHTTPServer:
    """Opens a server that answers `/` with a page made anew; its `serve_forever` runs it.

    Args:
        build: makes the page.
        port: port of 127.0.0.1; 0 takes any free one.

    Raises:
        CompactionError: if the port cannot be opened.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that the standard library calls
            # A name of another site that resolves here must not read the page.
            host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if host not in _LOOPBACK_NAMES:
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._answer()

        def _answer(self) -> None:
            try:
                status, kind, text = HTTPStatus.OK, "text/html", build()
            except Exception as error:  # such as a file that is just being written
                status, kind, text = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", _said(error)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet: a page that is looked at is no event."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise CompactionError(
            f"`port` {port} cannot be opened ({error.strerror}); give another, or 0 for any."
        ) from error
