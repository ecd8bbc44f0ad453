"""The server as the holder of an upload's sources: takes the lease, hears of its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields

import numpy as np

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.ids import HOLE
from blockcompact_jax.ledger.handles import OperationKey
from blockcompact_jax.protocol import UploadRows
from blockcompact_jax.upload import UploadPlan

from . import wire

Send = Callable[[str, wire.AckWire | wire.AbortWire | wire.CompactionUploadWire], None]
"""Sends a message by name, and returns when it was answered."""


class RemoteProducer:
    """A `ledger_transfers.Producer` that is a server."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def hold(
        self, key: OperationKey, upload: UploadPlan, *, num_tokens: int, selection_revision: int
    ) -> None:
        """Has the server check the rows and hold their sources.

        Raises:
            RemoteRefusedError: The server refused the upload.
            ServerLostError: The server is gone.
        """
        message = wire.CompactionUploadWire(
            key=_key_wire(key),
            selection_revision=selection_revision,
            source_kind=upload.source_kind,
            num_tokens=num_tokens,
            rows=_rows_wire(upload),
        )
        self._send("compaction_upload", message)

    def acknowledge(self, key: OperationKey) -> None:
        """Sends the ACK.

        Raises:
            ServerLostError: The server is gone; the commit stands.
        """
        self._send("ack", wire.AckWire(key=_key_wire(key)))

    def abort(self, key: OperationKey, *, reason: str) -> None:
        """Sends the abort, if there is still a server."""
        with suppress(CompactionError):  # A server that is gone holds nothing any more.
            self._send("abort", wire.AbortWire(key=_key_wire(key), reason=reason))


def _key_wire(key: OperationKey) -> wire.KeyWire:
    return wire.KeyWire(**vars(key))


def _rows_wire(upload: UploadPlan) -> wire.UploadRowsWire:
    is_used = np.asarray(upload.physical_block) != HOLE
    columns = {
        column.name: np.asarray(getattr(upload, column.name))[is_used].tolist()
        for column in fields(UploadRows)
    }
    # Ours, and checked by whoever gets them.
    return wire.UploadRowsWire.model_construct(**columns)
