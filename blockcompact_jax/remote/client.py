"""The engine's end of the wire: sends messages, retries them, notices a lost server."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException
from typing import Final, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.protocol import Capabilities

from . import wire
from .connections import Connections
from .errors import Refusal, RemoteRefusedError, ServerLostError

_ANSWER_SECONDS: Final = 3600.0
"""A prefill may take long; a server that died is noticed at once all the same."""
_IMPATIENT_SECONDS: Final = 1.0
_IMPATIENT_ANSWER_SECONDS: Final = 5.0
"""A server that was stopped keeps its connections, so nothing but time tells."""
_HTTP_PORT: Final = 80
_FIRST_PAUSE_SECONDS: Final = 0.02
_LAST_PAUSE_SECONDS: Final = 0.5

AnswerModel = TypeVar("AnswerModel", bound=BaseModel)


class RemoteClient:
    """Talks to one server. A message without an answer is sent again, as it was."""

    def __init__(self, url: str, *, token: str, retry_seconds: float = 30.0) -> None:
        """Connects to nothing yet.

        Args:
            url: Such as `http://127.0.0.1:8123`; a loopback address, since memory is shared.
            token: The server's bearer token.
            retry_seconds: How long a message without an answer is repeated.

        Raises:
            CompactionError: `url` is not a loopback HTTP address.
        """
        host, port = check_url(url)
        self.url = url
        self.lease_seconds = 0.0
        self.max_copy_blocks = 0
        self._retry_seconds = retry_seconds
        self._connections = Connections(host, port, token=token)

    def close(self) -> None:
        """Closes its connections."""
        self._connections.close()

    def shake_hands(
        self,
        capabilities: Callable[[int], Capabilities],
        *,
        is_copy_fallback_asked: bool = False,
    ) -> int:
        """Agrees with the server, and returns its process epoch.

        Args:
            capabilities: What this side says of itself, given the server's epoch.
            is_copy_fallback_asked: Whether the server may gather copies where it must.

        Raises:
            RemoteRefusedError: The sides differ; the message names the field and both values.
            ServerLostError: There is no server.
        """
        health = self._answer("GET", "/v1/health", None, wire.HealthAnswer)
        ours = wire.CapabilitiesWire.of(capabilities(health.process_epoch))
        message = wire.InitializeWire(
            capabilities=ours, is_copy_fallback_asked=is_copy_fallback_asked
        )
        answer = self.call("initialize", message, wire.InitializeAnswer)
        self.lease_seconds = answer.lease_seconds
        self.max_copy_blocks = answer.max_copy_blocks
        return answer.process_epoch

    def call(
        self, path: str, message: BaseModel, answer: type[AnswerModel], *, is_patient: bool = True
    ) -> AnswerModel:
        """Sends a message until it is answered.

        Args:
            path: Name of the message.
            message: The message; every retry is the same.
            answer: What comes back.
            is_patient: Whether to repeat it for `retry_seconds`, or for a second at most; and to
                wait as long as a model takes for an answer, or five seconds.

        Raises:
            RemoteRefusedError: The server refused it and changed nothing.
            ServerLostError: The server is gone, or was restarted.
        """
        body = message.model_dump_json().encode()
        return self._answer("POST", f"/v1/{path}", body, answer, is_patient=is_patient)

    def _answer(
        self,
        method: str,
        path: str,
        body: bytes | None,
        model: type[AnswerModel],
        *,
        is_patient: bool = True,
    ) -> AnswerModel:
        deadline = time.monotonic() + (
            self._retry_seconds if is_patient else min(self._retry_seconds, _IMPATIENT_SECONDS)
        )
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                status, content = self._connections.exchange(
                    method,
                    path,
                    body,
                    answer_seconds=_ANSWER_SECONDS if is_patient else _IMPATIENT_ANSWER_SECONDS,
                )
                break
            except (OSError, HTTPException) as error:
                if time.monotonic() + pause > deadline:
                    raise ServerLostError(
                        f"The verifier at {self.url} does not answer ({type(error).__name__}). "
                        "Start it again with `blockcompact serve` and the same port."
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        return _read(status, content, model)


class Heartbeat:
    """Tells the server, from a thread of its own, that a request's client is alive."""

    def __init__(self, client: RemoteClient, message: wire.FinishWire) -> None:
        """Starts to beat, four times a lease."""
        self._client = client
        self._message = message
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops, and waits until it has."""
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._is_over.wait(self._client.lease_seconds / 4):
            try:
                self._client.call("heartbeat", self._message, wire.DoneAnswer, is_patient=False)
            except (RemoteRefusedError, ServerLostError):
                continue  # The next real message says what is wrong, to someone who can act.


def _read(status: int, content: bytes, model: type[AnswerModel]) -> AnswerModel:
    try:
        if status == HTTPStatus.OK:
            return model.model_validate_json(content)
        refused = wire.ErrorAnswer.model_validate_json(content)
        refusal = Refusal(refused.refusal)
    except (ValidationError, ValueError) as error:
        raise ServerLostError(
            f"The verifier answered {status} with something else than its messages; "
            "see its own output, and install the same version on both sides."
        ) from error
    if refusal in {Refusal.EPOCH, Refusal.UNKNOWN}:
        raise ServerLostError(refused.message)
    raise RemoteRefusedError(refusal, refused.message)


def check_url(url: str) -> tuple[str, int]:
    """Returns host and port of a server on this machine.

    Raises:
        CompactionError: `url` is not HTTP to a loopback address, or says more than that.
    """
    try:
        parsed = urlsplit(url)
        host, port = parsed.hostname or "", parsed.port or _HTTP_PORT
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        parsed, host, port, is_loopback = urlsplit(""), "", 0, False
    if parsed.scheme != "http" or not is_loopback:
        raise CompactionError(
            f"`remote` is {url!r}; expected a loopback address such as http://127.0.0.1:8123. "
            "The verifier's memory is read in place, so it runs on this machine."
        )
    if parsed.path.strip("/") or parsed.query or parsed.fragment or "@" in parsed.netloc:
        raise CompactionError(
            f"`remote` is {url!r}; expected only a host and a port, such as http://127.0.0.1:8123."
        )
    return host, port
