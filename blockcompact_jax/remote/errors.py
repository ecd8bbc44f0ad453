"""Why a remote call was refused, as both sides see it."""

from __future__ import annotations

import enum

from blockcompact_jax.errors import CompactionError


class Refusal(enum.Enum):
    """What is wrong with a message; each has its HTTP status.

    BAD_MESSAGE: a value is impossible. UNAUTHORIZED: no token, or a wrong one. HANDSHAKE: the sides
    cannot work together. EPOCH: it is meant for another process. UNKNOWN: the request or the
    operation is not known. CONFLICT: it contradicts what was done. TOO_LARGE: over a limit.
    NO_ROOM: memory or places for requests are used up.
    """

    BAD_MESSAGE = "bad_message"
    UNAUTHORIZED = "unauthorized"
    HANDSHAKE = "handshake"
    EPOCH = "epoch"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    TOO_LARGE = "too_large"
    NO_ROOM = "no_room"

    @property
    def http_status(self) -> int:
        """Its HTTP status."""
        return _STATUS[self]


_STATUS = {
    Refusal.BAD_MESSAGE: 422,
    Refusal.UNAUTHORIZED: 401,
    Refusal.HANDSHAKE: 409,
    Refusal.EPOCH: 410,
    Refusal.UNKNOWN: 404,
    Refusal.CONFLICT: 409,
    Refusal.TOO_LARGE: 413,
    Refusal.NO_ROOM: 429,
}


class RemoteRefusedError(CompactionError):
    """The server refused a message, and changed nothing.

    Attributes:
        refusal: Why.
    """

    def __init__(self, refusal: Refusal, message: str) -> None:
        self.refusal = refusal
        super().__init__(message)


class ServerLostError(CompactionError):
    """The server that shook hands is gone, or is another process now."""


class SegmentError(CompactionError):
    """Shared memory could not be allocated or opened."""
