"""The ledger as an object: request IDs, all-or-nothing calls, stored results, queued ACKs.

It holds one lane of `LedgerState` and changes it by events alone. One thread owns it; only
`post_ack` may be called from others.
"""

# pyright: reportUnknownMemberType=false

import hashlib
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from blockcompact_jax.errors import CompactionError, ResultCode
from blockcompact_jax.ids import HOLE

from .cell import Cell, EventRow, NumpyCell
from .handles import HeldSlot, LedgerError, OperationKey, RequestRevisions, Staging
from .kinds import Condition, Disposition, EventKind, OperationStage, SlotState
from .places import RequestPlaces
from .records import OperationRecord, OperationRecords
from .state import LedgerShape, LedgerState, make_event
from .tables import disposition_of

_HARMLESS = frozenset({Disposition.APPLIED, Disposition.REPEATED})
_IGNORED = Disposition.IGNORED
_CODES = tuple(ResultCode)


class CommitLedger:
    """Keeps slots, operations and requests consistent under retries, lost ranks and restarts.

    A refused call raises `LedgerError` and changes nothing. A repeated event is harmless: the call
    returns its code, and `counts` counts it. So is a message of the past (`reach`, `acknowledge`,
    `abort`, `preempt`, `finish`); a decision of the past (all others) is refused.
    """

    def __init__(
        self,
        shape: LedgerShape,
        *,
        process_epoch: int = 1,
        new_cell: Callable[..., Cell] = NumpyCell,
    ) -> None:
        """Starts empty.

        Args:
            shape: Capacities; they bound all that is kept, stored results included.
            process_epoch: Epoch of the producer at the handshake.
            new_cell: Makes what applies events, given `shape` and `process_epoch`: the reference,
                or `kernels.NativeCell`, some hundred times faster.
        """
        self.shape = shape
        self._cell = new_cell(shape, process_epoch=process_epoch)
        self._num_refused = dict.fromkeys(Disposition, 0)
        self._places = RequestPlaces(shape.max_requests)
        self._records = OperationRecords(shape.max_operations)
        self._acks: deque[OperationKey] = deque()

    @property
    def state(self) -> LedgerState:
        """A copy of what the ledger knows, one lane: keep it, or give it to the invariants."""
        return jax.tree.map(np.array, self._state)

    @property
    def _state(self) -> LedgerState:
        return self._cell.state

    @property
    def process_epoch(self) -> int:
        """Epoch of the producer that may speak now."""
        return int(self._state.process_epoch[0])

    @property
    def counts(self) -> dict[Disposition, int]:
        """Events so far, by what became of them; a refused call counts as its refused event."""
        counted = self._state.counts[0]
        return {each: int(counted[each]) + self._num_refused[each] for each in Disposition}

    def admit(self, request_id: str) -> int:
        """Lets a request in, or in again after a preemption, and returns its new epoch.

        Args:
            request_id: Its whole ID.

        Raises:
            LedgerError: It runs already.
            CompactionError: No place for another request is left.
        """
        place = self._places.find(request_id)
        if place is None:
            place = self._places.free(self._state)
        _, value = self._apply(self._event(EventKind.ADMIT, request=place))
        self._places.put(request_id, place)
        return value

    def preempt(self, request_id: str, request_epoch: int) -> ResultCode:
        """Takes all slots of a request away; its open operation is aborted."""
        return self._end(EventKind.PREEMPT, request_id, request_epoch)

    def finish(self, request_id: str, request_epoch: int) -> ResultCode:
        """Ends a request, whatever it was doing. Slots return once they are quiet."""
        return self._end(EventKind.FINISH, request_id, request_epoch)

    def restart(self, process_epoch: int) -> None:
        """Takes a restarted producer's epoch over. Every request ends; admit what goes on.

        Args:
            process_epoch: The new epoch, larger than any before.
        """
        self._apply(self._event(EventKind.RESTART, process_epoch=process_epoch))
        self._acks.clear()

    def revisions(self, request_id: str) -> RequestRevisions:
        """Returns what a request has published.

        Raises:
            CompactionError: It is not known.
        """
        return self._places.revisions(request_id, self._state)

    def stage(
        self,
        request_id: str,
        basis: RequestRevisions,
        operation_id: int,
        *,
        body: bytes,
        num_slots: int,
        has_side_buffer: bool = False,
    ) -> Staging:
        """Opens an operation, and holds its source from now on.

        Args:
            request_id: The request.
            basis: What the plan was made from; its next selection is published by the commit.
            operation_id: Larger than any before in this epoch.
            body: What asked for it. The same ID with the same body is answered from the record.
            num_slots: Slots that it brings; 0 publishes a selection and moves nothing.
            has_side_buffer: Whether a second buffer must land with the slots.

        Raises:
            LedgerError: Another body, another open operation, an outdated basis, no place.
        """
        digest = hashlib.sha256(body).digest()
        name = (request_id, basis.request_epoch, operation_id)
        row = self._event(
            EventKind.STAGE,
            request=self._place(request_id, basis.request_epoch),
            request_epoch=basis.request_epoch,
            operation_id=operation_id,
            pool_generation=basis.pool_generation,
            map_revision=basis.map_revision,
            selection_revision=basis.selection_revision + 1,
            num_slots=num_slots,
            has_side_buffer=int(has_side_buffer),
            body_digest=int.from_bytes(digest[:4]) >> 1,
        )
        record = self._records.find(name)
        if record is not None and record.body_digest != digest:
            self._count(Disposition.REFUSED)
            raise LedgerError(ResultCode.OPERATION_CONFLICT, operation_id)
        _, place = self._apply(row)
        if record is not None:
            return Staging(
                key=record.key, is_repeated=True, result=record.result, failure=record.failure
            )
        key = OperationKey(
            process_epoch=self.process_epoch,
            request_id=request_id,
            request_epoch=basis.request_epoch,
            operation_id=operation_id,
            pool_generation=basis.pool_generation,
            map_revision=basis.map_revision,
        )
        self._records.put(place, name, OperationRecord(body_digest=digest, key=key))
        return Staging(key=key, is_repeated=False, result=None, failure=None)

    def reserve(
        self, key: OperationKey, *, num_slots: int | None = None, slots: Sequence[int] | None = None
    ) -> list[HeldSlot]:
        """Reserves slots for a staged operation: all that are asked for, or none.

        Args:
            key: The operation.
            num_slots: How many of the lowest free ones, or
            slots: these.

        Raises:
            LedgerError: Too few are free, one is taken or named twice, or the operation has enough.
        """
        if (num_slots is None) == (slots is None):
            raise CompactionError("Give either `num_slots` or `slots` to `reserve`.")
        if min(slots or (), default=0) < 0:
            raise CompactionError(f"`slots` has a negative entry: {slots}; name real slots.")
        wanted = [HOLE] * (num_slots or 0) if slots is None else slots
        rows = [self._of(EventKind.RESERVE, key, slot=slot) for slot in wanted]
        return [self._held(slot) for _, slot in self._apply_all(rows)]

    def issue(self, key: OperationKey) -> ResultCode:
        """Sends a staged operation to the ranks: its transfer, or only its selection."""
        return self._apply(self._of(EventKind.ISSUE, key))[0]

    def reach(self, key: OperationKey, *, rank: int, condition: Condition) -> ResultCode:
        """Takes down what a rank has reached. Ranks never stand in for each other."""
        return self.reach_all(key, ranks=[rank], conditions=[condition])[0]

    def reach_all(
        self, key: OperationKey, *, ranks: Sequence[int], conditions: Sequence[Condition]
    ) -> list[ResultCode]:
        """`reach` of several ranks and conditions, in this order; one refusal refuses all."""
        rows = self._reaching(key, ranks, conditions)
        return [code for code, _ in self._apply_all(rows, is_message=True)]

    def check_commit(
        self, key: OperationKey, *, ranks: Sequence[int], conditions: Sequence[Condition]
    ) -> None:
        """Raises what `commit` would after `reach_all` of these arguments. Changes nothing.

        Raises:
            LedgerError: A condition is missing; the message names it and the rank.
        """
        rows = [*self._reaching(key, ranks, conditions), self._of(EventKind.COMMIT, key)]
        self._apply_all(rows)
        self._cell.undo()

    def commit(self, key: OperationKey, *, result: bytes | None = None) -> ResultCode:
        """Publishes an operation that every rank has completed, and stores its result.

        Args:
            key: The operation.
            result: What a retry of the same body is answered with.

        Raises:
            LedgerError: A condition is missing; the message names it and the rank.
        """
        code, _ = self._apply(self._of(EventKind.COMMIT, key))
        if code is ResultCode.OK and result is not None:
            self._records.of(key).result = result
        return code

    def acknowledge(self, key: OperationKey) -> ResultCode:
        """Closes a committed operation. A second ACK changes nothing."""
        return self._apply(self._of(EventKind.ACK, key), is_message=True)[0]

    def abort(self, key: OperationKey, *, reason: str = "aborted") -> ResultCode:
        """Returns what an operation holds; slots that a copy may still reach wait for quiet ranks.

        Args:
            key: The operation.
            reason: Why, for whoever asks again.
        """
        code, _ = self._apply(self._of(EventKind.ABORT, key), is_message=True)
        if code is ResultCode.OK:
            self._records.of(key).failure = reason
        return code

    def evict(self, request_id: str, request_epoch: int, held: Sequence[HeldSlot]) -> None:
        """Retires resident slots of a request that has no operation open: all, or none."""
        place = self._place(request_id, request_epoch)
        common = {"request": place, "request_epoch": request_epoch}
        rows = [
            self._event(EventKind.EVICT, **common, slot=each.slot, slot_generation=each.generation)
            for each in held
        ]
        self._apply_all(rows)

    def quiesce(self, held: Sequence[HeldSlot], *, rank: int) -> None:
        """Takes down that nothing on a rank reads or writes retiring slots any more."""
        self._apply_all(
            [
                self._event(
                    EventKind.QUIESCE, slot=each.slot, slot_generation=each.generation, rank=rank
                )
                for each in held
            ]
        )

    def post_ack(self, key: OperationKey) -> None:
        """Queues an ACK from any thread; `drain_acks` applies it.

        Raises:
            CompactionError: The queue is full, because nothing drains it.
        """
        if len(self._acks) >= 4 * self.shape.max_operations:
            raise CompactionError(
                f"{len(self._acks)} ACKs are waiting; call `drain_acks` in every loop of the "
                "engine, also in one that only decodes."
            )
        self._acks.append(key)

    def drain_acks(self) -> list[tuple[OperationKey, ResultCode]]:
        """Applies the queued ACKs, needing nothing else to happen; one that fails stops no other.

        Returns:
            Each with its code; `disposition_of` says which are errors.
        """
        answers: list[tuple[OperationKey, ResultCode]] = []
        while self._acks:
            key = self._acks.popleft()
            try:
                answers.append((key, self.acknowledge(key)))
            except LedgerError as error:
                answers.append((key, error.code))
        return answers

    def resident_slots(self, request_id: str) -> list[HeldSlot]:
        """Returns what can be read for a request, ascending."""
        place = self._places.find(request_id)
        slots = self._state.slots
        is_read = (slots.request[0] == (HOLE if place is None else place)) & (
            slots.state[0] == SlotState.RESIDENT
        )
        return [self._held(int(slot)) for slot in np.flatnonzero(is_read)]

    def retiring_slots(self, rank: int) -> list[HeldSlot]:
        """Returns the slots that wait for this rank to be quiet, ascending."""
        slots = self._state.slots
        is_loud = (np.asarray(slots.quiet_ranks[0]) >> rank) & 1 == 0
        waits = (slots.state[0] == SlotState.RETIRING) & is_loud
        return [self._held(int(slot)) for slot in np.flatnonzero(waits)]

    def stage_of(self, key: OperationKey) -> OperationStage | None:
        """Returns how far an operation is; None if it is not remembered."""
        place = self._records.place_of((key.request_id, key.request_epoch, key.operation_id))
        if place is None:
            return None
        return OperationStage(int(self._state.operations.stage[0, place]))

    def _end(self, kind: EventKind, request_id: str, request_epoch: int) -> ResultCode:
        place = self._place(request_id, request_epoch)
        row = self._event(kind, request=place, request_epoch=request_epoch)
        return self._apply(row, is_message=True)[0]

    def _reaching(
        self, key: OperationKey, ranks: Sequence[int], conditions: Sequence[Condition]
    ) -> list[EventRow]:
        named = [(rank, condition) for rank in ranks for condition in conditions]
        return [self._of(EventKind.REACH, key, rank=r, condition=c) for r, c in named]

    def _held(self, slot: int) -> HeldSlot:
        return HeldSlot(slot=slot, generation=int(self._state.slots.generation[0, slot]))

    def _event(self, kind: EventKind, **values: int) -> EventRow:
        values.setdefault("process_epoch", self.process_epoch)
        return make_event(kind, **values)

    def _of(self, kind: EventKind, key: OperationKey, **values: int) -> EventRow:
        return make_event(
            kind,
            process_epoch=key.process_epoch,
            request=self._place(key.request_id, key.request_epoch),
            request_epoch=key.request_epoch,
            operation_id=key.operation_id,
            pool_generation=key.pool_generation,
            map_revision=key.map_revision,
            **values,
        )

    def _place(self, request_id: str, request_epoch: int) -> int:
        try:
            return self._places.of_epoch(request_id, request_epoch, self._state)
        except LedgerError:
            self._count(Disposition.REFUSED)
            raise

    def _apply(self, row: EventRow, *, is_message: bool = False) -> tuple[ResultCode, int]:
        return self._apply_all([row], is_message=is_message)[0]

    def _apply_all(
        self, rows: Sequence[EventRow], *, is_message: bool = False
    ) -> list[tuple[ResultCode, int]]:
        """Applies events in order; if one is refused, none has happened.

        A message may be of the past, and is ignored then. A decision may not.
        """
        if not rows:
            return []
        answers: list[tuple[ResultCode, int]] = []
        for number, value in self._cell.apply(rows):
            code = _CODES[number]
            answers.append((code, value))
            if code is ResultCode.OK:
                continue
            disposition = disposition_of(code)
            is_fine = disposition in _HARMLESS or (is_message and disposition is _IGNORED)
            if not is_fine:
                self._cell.undo()
                self._count(disposition)
                raise LedgerError(code, value)
        return answers

    def _count(self, disposition: Disposition) -> None:
        self._num_refused[disposition] += 1
