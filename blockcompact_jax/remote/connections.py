"""Connections to one server that stay open between messages."""

from __future__ import annotations

from http.client import HTTPConnection
from typing import Final

_CONNECT_SECONDS: Final = 2.0


class Connections:
    """As many connections as threads use at once; each carries one message at a time."""

    def __init__(self, host: str, port: int, *, token: str) -> None:
        """Connects to nothing yet.

        Args:
            host: The server's.
            port: The server's.
            token: Bearer token of every message.
        """
        self._host = host
        self._port = port
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._idle: list[HTTPConnection] = []

    def exchange(
        self, method: str, path: str, body: bytes | None, *, answer_seconds: float
    ) -> tuple[int, bytes]:
        """Sends a message once; returns status and body of the answer.

        Args:
            method: Of HTTP.
            path: Where to.
            body: What to send.
            answer_seconds: How long the server may say nothing.

        Raises:
            OSError: The server is not there, hung up, or says nothing.
            http.client.HTTPException: It answered something else than HTTP, or only in part.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            connection.sock.settimeout(answer_seconds)
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            content = response.read()
        except BaseException:
            connection.close()
            raise
        if connection.sock is not None:  # It is None where the server closes after its answer.
            self._idle.append(connection)
        return response.status, content

    def close(self) -> None:
        """Closes what is idle."""
        while self._idle:
            self._idle.pop().close()

    def _connect(self) -> HTTPConnection:
        connection = HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        connection.connect()
        return connection
