"""One rank: a process that moves its KV heads from the server's memory into its own pool.

`python -m blockcompact_jax.ranks.worker FD` serves the socket FD until it is closed.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import numpy as np

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.kernels import (
    PackedStrides,
    PlainStrides,
    RegisteredPool,
    host_pool_upload,
    raise_for_status,
)
from blockcompact_jax.remote.segment import OpenedSegment

from . import wire


class RankWorker:
    """What one rank has open, and what it does with each message."""

    def __init__(self) -> None:
        self._plain: RegisteredPool | None = None
        self._packed: RegisteredPool | None = None
        self._share = (0, 0)

    def answer(self, body: bytes) -> wire.AnswerWire:
        """Does what a message asks, and returns what to say of it."""
        message = wire.read_message.validate_json(body)
        key = message.key if isinstance(message, wire.TransferWire) else None
        try:
            self._do(message)
        except (CompactionError, ValueError, OSError) as error:
            refusal = str(error) or type(error).__name__
            return wire.AnswerWire(message_id=message.message_id, key=key, refusal=refusal)
        return wire.AnswerWire(message_id=message.message_id, key=key)

    def close(self) -> None:
        """Unregisters its pools."""
        for pool in (self._plain, self._packed):
            if pool is not None:
                pool.close()

    def _do(self, message: wire.OpenPoolWire | wire.OpenSourceWire | wire.TransferWire) -> None:
        if isinstance(message, wire.OpenPoolWire):
            self._share = message.first_kv_head, message.num_kv_heads
            self._plain = self._open_plain(message.pool)
        elif isinstance(message, wire.OpenSourceWire):
            packed = self._open_packed(message)
            if self._packed is not None:
                self._packed.close()
            self._packed = packed
        else:
            self._transfer(message)

    def _transfer(self, message: wire.TransferWire) -> None:
        if self._plain is None or self._packed is None:
            raise CompactionError("No pool or no source is open; send `open_pool`, `open_source`.")
        if not message.source_block:
            return
        names = ("layer_row", "source_block", "physical_block", "valid_tokens")
        columns = {name: np.asarray(getattr(message, name), np.int32) for name in names}
        moved = host_pool_upload(
            self._packed.current_ord(),
            self._plain.current_ord(),
            *columns.values(),
            packed_pool=self._packed,
            plain_pool=self._plain,
        )
        raise_for_status(moved.status, call="pool_upload", **columns)

    def _open_plain(self, pool: wire.PoolWire) -> RegisteredPool:
        """Opens this rank's part of the resident pool and clears it: a new rank holds nothing."""
        first, count = self._share
        head_bytes = pool.size_bytes // pool.num_kv_heads
        memory = _map(pool, is_writable=True)[first * head_bytes : (first + count) * head_bytes]
        memory[:] = 0
        kv = pool.num_blocks * pool.block_tokens * pool.head_dim
        return RegisteredPool.register_plain(
            memory.ctypes.data,
            num_layers=pool.num_layers,
            num_blocks=pool.num_blocks,
            num_kv_heads=count,
            block_tokens=pool.block_tokens,
            head_dim=pool.head_dim,
            element_bytes=pool.element_bytes,
            strides=PlainStrides(
                layer=2 * kv,
                kv=kv,
                block=pool.block_tokens * pool.head_dim,
                head=pool.num_layers * 2 * kv,
                token=pool.head_dim,
            ),
            size_bytes=memory.nbytes,
            keepalive=memory,
        )

    def _open_packed(self, message: wire.OpenSourceWire) -> RegisteredPool:
        pool = message.pool
        first, count = self._share
        memory = _map(pool, is_writable=False)[first * pool.head_elements * pool.element_bytes :]
        row = pool.num_kv_heads * pool.head_elements
        num_layers = self._plain.shape.num_layers if self._plain is not None else pool.num_layers
        address = memory.ctypes.data
        return RegisteredPool.register_packed(
            [address] * num_layers if pool.num_layers == 1 else address,
            layout=message.layout,
            num_layers=num_layers,
            num_blocks=pool.num_blocks,
            num_kv_heads=count,
            block_tokens=pool.block_tokens,
            head_dim=pool.head_dim,
            element_bytes=pool.element_bytes,
            size_bytes=memory.nbytes,
            keepalive=memory,
            strides=PackedStrides(layer=pool.num_blocks * row, block=row),
            is_writable=False,
        )


def serve_rank(connection: Connection) -> None:
    """Answers messages until the engine hangs up, or is gone."""
    worker = RankWorker()
    try:
        while True:
            body = connection.recv_bytes(wire.MAX_MESSAGE_BYTES)
            connection.send_bytes(worker.answer(body).model_dump_json().encode())
    except (EOFError, ConnectionError):
        worker.close()


def _map(pool: wire.PoolWire, *, is_writable: bool) -> np.ndarray:
    """Maps a pool's region as bytes."""
    segment = OpenedSegment(pool.segment.to_handle(), is_writable=is_writable)
    try:
        return np.frombuffer(segment.region(pool.region, pool.size_bytes), np.uint8)
    finally:
        segment.close()


if __name__ == "__main__":
    serve_rank(Connection(int(sys.argv[1])))
