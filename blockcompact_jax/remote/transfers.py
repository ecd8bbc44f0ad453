"""One request's uploads, each an operation of the commit ledger and of the server's leases."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import numpy as np

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.ids import HOLE
from blockcompact_jax.ledger import CommitLedger, Condition, LedgerShape
from blockcompact_jax.ledger.handles import HeldSlot, OperationKey
from blockcompact_jax.protocol import CompactionUpload, UploadRow, canonical_body
from blockcompact_jax.upload import UploadPlan

from . import wire

_COLUMNS = (
    "layer",
    "group",
    "logical_block",
    "source_block",
    "cpu_destination_block",
    "physical_block",
    "valid_tokens",
)

_ON_LANDING = (Condition.READERS_DONE, Condition.LANDED)
"""What a rank's word says; nothing drafts during a transfer, so no reader runs."""
_ON_TABLES = (Condition.TABLES_WRITTEN, Condition.COMPLETED)

Send = Callable[[str, wire.AckWire | wire.AbortWire | wire.CompactionUploadWire], None]
"""Sends a message by name, and returns when it was answered."""


class LedgerTransfers:
    """What surrounds a transfer: stage, lease, issue; then completion, commit and, later, the ACK.

    A slot of this ledger is all that one selection brings: the blocks of a selection live and die
    together, so one event an operation says the same as one a block.

    Attributes:
        ledger: The ledger, for whoever wants to look.
        request_epoch: The request's present admission.
    """

    def __init__(
        self, request_id: str, process_epoch: int, send: Send, *, num_ranks: int = 1
    ) -> None:
        shape = LedgerShape(max_requests=1, max_operations=4, max_slots=2, num_ranks=num_ranks)
        self.ledger = CommitLedger(shape, process_epoch=process_epoch)
        self._ranks = range(num_ranks)
        self._open: OperationKey | None = None
        self._awaited: tuple[Condition, ...] = ()
        self.request_epoch = self.ledger.admit(request_id)
        self._request_id = request_id
        self._send = send
        self._unacknowledged: OperationKey | None = None
        self._replaced: list[HeldSlot] = []
        self._next_operation_id = 0

    def new_operation_id(self) -> int:
        """Returns an ID that this admission has not used."""
        self._next_operation_id += 1
        return self._next_operation_id - 1

    def restart(self, process_epoch: int) -> None:
        """Forgets what a server that is gone knew: nothing is resident, the request is new."""
        if process_epoch == self.ledger.process_epoch:  # Only the request was lost.
            self.ledger.finish(self._request_id, self.request_epoch)
        else:
            self.ledger.restart(process_epoch)
        self._quiesce()
        self.request_epoch = self.ledger.admit(self._request_id)
        self._unacknowledged = None
        self._replaced = []
        self._next_operation_id = 0

    @property
    def open_key(self) -> OperationKey:
        """The operation whose transfer runs now."""
        if self._open is None:
            raise RuntimeError("no transfer is open; it runs within `transaction`")
        return self._open

    def landed(self, rank: int, key: OperationKey) -> None:
        """Takes down that a rank has done its part of a transfer; twice or late is harmless.

        Args:
            rank: Which rank.
            key: What it says it has done.

        Raises:
            LedgerError: The key is of the future, or of no operation there was (COM-3).
        """
        self.ledger.reach_all(key, ranks=[rank], conditions=self._awaited)

    @contextmanager
    def transaction(self, upload: UploadPlan, num_tokens: int) -> Generator[None]:
        """Surrounds one transfer; see `runtime.Transaction`. Within it every rank says `landed`.

        Raises:
            RemoteRefusedError: The server refused the upload.
            ServerLostError: The server is gone.
            LedgerError: The ledger refused a step.
        """
        ledger = self.ledger
        self.acknowledge()
        message = self._message(upload, num_tokens)
        key, num_slots = message.key, min(len(message.rows), 1)
        earlier = ledger.resident_slots(self._request_id)
        ledger.stage(
            self._request_id,
            ledger.revisions(self._request_id),
            key.operation_id,
            body=canonical_body(message),
            num_slots=num_slots,
        )
        try:
            if num_slots:
                ledger.reserve(key, num_slots=num_slots)
            self._send("compaction_upload", _upload_wire(message))
            ledger.issue(key)
            self._open, self._awaited = key, _ON_LANDING if num_slots else (Condition.COMPLETED,)
            yield
            # The new tables were written on this thread, for all ranks.
            if num_slots:
                ledger.reach_all(key, ranks=self._ranks, conditions=_ON_TABLES)
            ledger.commit(key)
        except BaseException as error:
            self._abort(key, reason=f"{type(error).__name__}: {error}"[:1000])
            raise
        finally:
            self._open = None
        self._unacknowledged = key
        self._replaced = earlier if num_slots else []

    def acknowledge(self) -> None:
        """Sends the ACK of the newest commit, if it is still to be sent (COM-1).

        Raises:
            ServerLostError: The server is gone; the commit stands.
        """
        key = self._unacknowledged
        if key is None:
            return
        self._send("ack", wire.AckWire(key=_key_wire(key)))
        self.ledger.acknowledge(key)
        self._unacknowledged = None
        # What the newest selection kept of an earlier one is its own from now on.
        self.ledger.evict(self._request_id, self.request_epoch, self._replaced)
        self._replaced = []
        self._quiesce()

    def _message(self, upload: UploadPlan, num_tokens: int) -> CompactionUpload:
        revisions = self.ledger.revisions(self._request_id)
        is_used = np.asarray(upload.physical_block) != HOLE
        columns = [np.asarray(getattr(upload, name))[is_used].tolist() for name in _COLUMNS]
        rows = tuple(
            UploadRow(**dict(zip(_COLUMNS, values, strict=True)))
            for values in zip(*columns, strict=True)
        )
        return CompactionUpload(
            key=OperationKey(
                process_epoch=self.ledger.process_epoch,
                request_id=self._request_id,
                request_epoch=self.request_epoch,
                operation_id=self.new_operation_id(),
                pool_generation=revisions.pool_generation,
                map_revision=revisions.map_revision,
            ),
            selection_revision=revisions.selection_revision + 1,
            source_kind=upload.source_kind,
            num_tokens=num_tokens,
            rows=rows,
        )

    def _abort(self, key: OperationKey, *, reason: str) -> None:
        """Returns all that an operation holds. Every rank has answered or is dead: quiet."""
        self.ledger.abort(key, reason=reason)
        self._quiesce()
        with suppress(CompactionError):  # A server that is gone holds nothing any more.
            self._send("abort", wire.AbortWire(key=_key_wire(key), reason=reason))

    def _quiesce(self) -> None:
        for rank in self._ranks:
            self.ledger.quiesce(self.ledger.retiring_slots(rank), rank=rank)


def _key_wire(key: OperationKey) -> wire.KeyWire:
    return wire.KeyWire(**vars(key))


def _upload_wire(message: CompactionUpload) -> wire.CompactionUploadWire:
    return wire.CompactionUploadWire(
        key=_key_wire(message.key),
        selection_revision=message.selection_revision,
        source_kind=message.source_kind,
        num_tokens=message.num_tokens,
        # Ours, and checked by whoever gets them.
        rows=[wire.UploadRowWire.model_construct(**vars(row)) for row in message.rows],
    )
