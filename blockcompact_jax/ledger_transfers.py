"""What surrounds a transfer of one request: the steps of the commit ledger, and who holds sources.

A session in one process and one whose sources are another's go through the same steps (COM-5).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from blockcompact_jax.kernels.ledger import NativeCell
from blockcompact_jax.ledger import CommitLedger, Condition, LedgerShape
from blockcompact_jax.ledger.handles import HeldSlot, OperationKey
from blockcompact_jax.transfer import ROW_COLUMNS
from blockcompact_jax.upload import UploadPlan

_ON_LANDING = (Condition.READERS_DONE, Condition.LANDED)
"""What a rank's word says; nothing drafts during a transfer, so no reader runs."""
_ON_TABLES = (Condition.TABLES_WRITTEN, Condition.COMPLETED)
"""What the written tables say, for all ranks; with no slots there is nothing to say."""


class Producer(Protocol):
    """Whoever holds the sources of transfers."""

    def hold(
        self, key: OperationKey, upload: UploadPlan, *, num_tokens: int, selection_revision: int
    ) -> None:
        """Keeps the sources of an upload as they are until its ACK or abort."""
        ...

    def acknowledge(self, key: OperationKey) -> None:
        """Hears that an operation was committed; its sources may go."""
        ...

    def abort(self, key: OperationKey, *, reason: str) -> None:
        """Hears that an operation ends without a commit, if it still hears anything."""
        ...


class LedgerTransfers:
    """What surrounds a transfer: stage, lease, issue; then completion, commit and ACK.

    A slot of this ledger is all that one selection brings: the blocks of a selection live and die
    together, so one event an operation says the same as one a block.

    Attributes:
        ledger: The ledger, for whoever wants to look.
        request_epoch: The request's present admission.
    """

    def __init__(
        self,
        request_id: str,
        *,
        process_epoch: int = 1,
        num_ranks: int = 1,
        producer: Producer | None = None,
    ) -> None:
        """Admits the request.

        Args:
            request_id: Its whole ID.
            process_epoch: The producer's epoch.
            num_ranks: Ranks that say `landed` of every transfer.
            producer: Whoever holds the sources, and is to be told; None in this very process,
                where a commit is acknowledged at once.
        """
        shape = LedgerShape(max_requests=1, max_operations=4, max_slots=2, num_ranks=num_ranks)
        self.ledger = CommitLedger(shape, process_epoch=process_epoch, new_cell=NativeCell)
        self._ranks = range(num_ranks)
        self._open: OperationKey | None = None
        self._awaited: tuple[Condition, ...] = ()
        self.request_epoch = self.ledger.admit(request_id)
        self._request_id = request_id
        self._producer = producer
        self._unacknowledged: OperationKey | None = None
        self._replaced: Sequence[HeldSlot] = ()
        self._next_operation_id = 0

    def new_operation_id(self) -> int:
        """Returns an ID that this admission has not used."""
        self._next_operation_id += 1
        return self._next_operation_id - 1

    def restart(self, process_epoch: int) -> None:
        """Forgets what a producer that is gone knew: nothing is resident, the request is new."""
        if process_epoch == self.ledger.process_epoch:  # Only the request was lost.
            self.ledger.finish(self._request_id, self.request_epoch)
        else:
            self.ledger.restart(process_epoch)
        self._quiesce()
        self.request_epoch = self.ledger.admit(self._request_id)
        self._unacknowledged = None
        self._replaced = ()
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
    def transaction(self, upload: UploadPlan, num_tokens: int) -> Generator[Callable[[], None]]:
        """Surrounds one transfer; see `transfer.Transaction`. Within it every rank says `landed`.

        Yields:
            What raises LedgerError, naming a rank, until all have said so (COM-7).

        Raises:
            LedgerError: The ledger refused a step.
            CompactionError: Whatever the producer raises; nothing is staged any more then.
        """
        ledger = self.ledger
        self.acknowledge()
        num_slots = min(int(upload.num_rows), 1)
        earlier = ledger.resident_slots(self._request_id)
        revisions = ledger.revisions(self._request_id)
        key = ledger.stage(
            self._request_id,
            revisions,
            self.new_operation_id(),
            body=_body(upload, num_tokens),
            num_slots=num_slots,
        ).key
        try:
            if num_slots:
                ledger.reserve(key, num_slots=num_slots)
            if self._producer is not None:
                revision = revisions.selection_revision + 1
                self._producer.hold(key, upload, num_tokens=num_tokens, selection_revision=revision)
            ledger.issue(key)
            self._open, self._awaited = key, _ON_LANDING if num_slots else (Condition.COMPLETED,)
            on_tables = _ON_TABLES if num_slots else ()
            yield lambda: ledger.check_commit(key, ranks=self._ranks, conditions=on_tables)
            # The new tables were written on this thread, for all ranks.
            ledger.reach_all(key, ranks=self._ranks, conditions=on_tables)
            ledger.commit(key)
        except BaseException as error:
            self._abort(key, reason=f"{type(error).__name__}: {error}"[:1000])
            raise
        finally:
            self._open = None
        self._unacknowledged = key
        self._replaced = earlier if num_slots else ()
        if self._producer is None:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Closes the newest commit and tells the producer, if that is still to be done (COM-1).

        Raises:
            CompactionError: The producer does not hear it; the commit stands.
        """
        key = self._unacknowledged
        if key is None:
            return
        if self._producer is not None:
            self._producer.acknowledge(key)
        self.ledger.acknowledge(key)
        self._unacknowledged = None
        # What the newest selection kept of an earlier one is its own from now on.
        self.ledger.evict(self._request_id, self.request_epoch, self._replaced)
        self._replaced = ()
        self._quiesce()

    def _abort(self, key: OperationKey, *, reason: str) -> None:
        """Returns all that an operation holds. Every rank has answered or is dead: quiet."""
        self.ledger.abort(key, reason=reason)
        self._quiesce()
        if self._producer is not None:
            self._producer.abort(key, reason=reason)

    def _quiesce(self) -> None:
        for rank in self._ranks:
            self.ledger.quiesce(self.ledger.retiring_slots(rank), rank=rank)


def _body(upload: UploadPlan, num_tokens: int) -> bytes:
    """Returns what an upload is told from another by."""
    columns = (np.asarray(getattr(upload, name)).tobytes() for name in ROW_COLUMNS)
    return b"".join([int(num_tokens).to_bytes(8, "little"), *columns])
