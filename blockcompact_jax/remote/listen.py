"""The socket of a server, and the loop that serves it."""

from __future__ import annotations

import ipaddress
import socket

import uvicorn
from fastapi import FastAPI

from blockcompact_jax.errors import CompactionError

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 600
"""Longer than a client computes between two messages."""


def listen(host: str, port: int) -> socket.socket:
    """Binds a loopback address; connections are accepted and wait from now on.

    Args:
        host: A loopback address; localhost is 127.0.0.1.
        port: 0 takes any free one.

    Raises:
        CompactionError: `host` is another address, or the port is taken.
    """
    if host == "localhost":
        host = "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise CompactionError(
            f"`host` is {host!r}; expected a loopback address such as 127.0.0.1: memory is "
            "shared, so the engine runs on this machine."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends every answer at once; otherwise each takes 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise CompactionError(
            f"`port` {port} of {host} cannot be used ({error.strerror}); give another, or 0."
        ) from error
    return listening


def url_of(listening: socket.socket) -> str:
    """Returns the URL that clients of a socket use."""
    address, port = listening.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def run_until_stopped(app: FastAPI, listening: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM; open requests are released then."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        lifespan="on",
    )
    uvicorn.Server(config).run(sockets=[listening])
