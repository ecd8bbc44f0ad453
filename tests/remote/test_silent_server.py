"""A server that takes messages and answers none, as one that was stopped with a signal."""

import socket
import threading

import pytest

from blockcompact_jax.remote import client as client_module
from blockcompact_jax.remote import wire
from blockcompact_jax.remote.client import Heartbeat, RemoteClient
from blockcompact_jax.remote.connections import Connections
from blockcompact_jax.remote.errors import ServerLostError

from .tiny import TOKEN

MESSAGE = wire.FinishWire(process_epoch=1, request_id="request", request_epoch=1)


@pytest.fixture
def silent():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)
        yield listening


@pytest.fixture
def client(silent, monkeypatch):
    monkeypatch.setattr(client_module, "_IMPATIENT_ANSWER_SECONDS", 0.1)
    made = RemoteClient(f"http://127.0.0.1:{silent.getsockname()[1]}", token=TOKEN)
    yield made
    made.close()


def test_COM_8_an_impatient_message_waits_for_no_answer(client):
    """COM-8: nobody waits as long as a prefill may take to end a request."""
    with pytest.raises(ServerLostError, match="TimeoutError"):
        client.call("finish", MESSAGE, wire.DoneAnswer, is_patient=False)


def test_COM_8_a_heartbeat_without_an_answer_can_be_stopped(client, silent):
    """COM-8: closing a session joins this thread."""
    client.lease_seconds = 0.01
    heartbeat = Heartbeat(client, MESSAGE)
    with silent.accept()[0] as heard:
        assert heard.recv(5) == b"POST "
        heartbeat.stop()


def test_each_message_has_its_own_patience(silent):
    """A connection that a patient message leaves behind gives the next one no more time."""

    def answer_once():
        with silent.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            is_over.wait(30)

    is_over = threading.Event()
    server = threading.Thread(target=answer_once)
    server.start()
    connections = Connections(*silent.getsockname(), token=TOKEN)
    try:
        assert connections.exchange("GET", "/", None, answer_seconds=30) == (200, b"{}")
        with pytest.raises(TimeoutError):
            connections.exchange("GET", "/", None, answer_seconds=0.1)
    finally:
        is_over.set()
        server.join()
        connections.close()
