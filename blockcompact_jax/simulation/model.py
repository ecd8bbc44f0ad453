"""A second ledger, written from the contracts with sets, lists and early returns.

It shares the vocabulary of events and codes with `blockcompact_jax.ledger` and nothing else: no
table, no guard, no array. Where the two disagree, one of them is wrong.
"""

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ledger.kinds import Condition, EventKind
from blockcompact_jax.ledger.state import EVENT_FIELDS, LedgerShape

from .model_parts import (
    ModelOperation,
    ModelRequest,
    ModelSlot,
    encode_operation,
    encode_request,
    encode_slot,
)

_ENDED = ("closed", "aborted")
_MISSING = {
    Condition.READERS_DONE: ResultCode.MISSING_READERS,
    Condition.LANDED: ResultCode.MISSING_TRANSFER,
    Condition.SIDE_LANDED: ResultCode.MISSING_SIDE_BUFFER,
    Condition.TABLES_WRITTEN: ResultCode.MISSING_TABLES,
    Condition.COMPLETED: ResultCode.MISSING_COMPLETION,
}
_HARMLESS = {
    ResultCode.OK: 0,
    ResultCode.EVENT_REPEATED: 1,
    ResultCode.OPERATION_REPEATED: 1,
    ResultCode.EVENT_LATE: 2,
    ResultCode.EPOCH_STALE: 2,
    ResultCode.OPERATION_FORGOTTEN: 2,
}

Answer = tuple[ResultCode, int]


class ModelLedger:
    """The reference for `apply_event`, one lane of it."""

    def __init__(self, shape: LedgerShape, *, process_epoch: int = 1) -> None:
        """Starts with nothing."""
        self.shape = shape
        self.slots = [ModelSlot(number) for number in range(shape.max_slots)]
        self.requests = [ModelRequest() for _ in range(shape.max_requests)]
        self.places: list[ModelOperation | None] = [None] * shape.max_operations
        self.process_epoch = process_epoch
        self.next_epoch = 1
        self.next_sequence = 1
        self.counts = [0, 0, 0, 0]

    def apply(self, row: tuple[int, ...]) -> Answer:
        """Applies one row of an event table.

        Returns:
            The code and the value of `Outcome`.
        """
        kind = EventKind(row[0])
        if kind is EventKind.NONE:
            return ResultCode.OK, -1
        answer = self._answer(kind, dict(zip(EVENT_FIELDS, row, strict=True)))
        self.counts[_HARMLESS.get(answer[0], 3)] += 1
        return answer

    def encode(self) -> tuple[int, ...]:
        """Returns all that it knows, in the order of `flatten_state`."""
        numbers = [self.process_epoch, self.next_epoch, self.next_sequence, *self.counts]
        for slot in self.slots:
            numbers += encode_slot(slot)
        for operation in self.places:
            numbers += encode_operation(operation)
        for request in self.requests:
            numbers += encode_request(request)
        return tuple(numbers)

    def find(self, request: int, epoch: int, operation_id: int) -> ModelOperation | None:
        """Returns a remembered operation."""
        for known in self.places:
            if known is not None and known.operation_id == operation_id:
                row = known.row
                if row["request"] == request and row["request_epoch"] == epoch:
                    return known
        return None

    def open_operation(self, request: int, *stages: str) -> ModelOperation | None:
        """Returns the operation of a request that is in one of the stages."""
        for known in self.places:
            if known is not None and known.stage in stages and known.row["request"] == request:
                return known
        return None

    # The order of the checks is the rule, so they stand in one place each.
    def _answer(  # noqa: PLR0911, PLR0912
        self, kind: EventKind, event: dict[str, int]
    ) -> Answer:
        bad = self._out_of_range(kind, event)
        if bad is not None:
            return ResultCode.EVENT_OUT_OF_RANGE, bad
        if kind is EventKind.QUIESCE:
            return self._quiesce(event)
        if kind is EventKind.RESTART:
            return self._restart(event["process_epoch"])
        if event["process_epoch"] != self.process_epoch:
            return ResultCode.PROCESS_EPOCH_MISMATCH, event["process_epoch"]
        request = self.requests[event["request"]]
        if kind is EventKind.ADMIT:
            return self._admit(request)
        if event["request_epoch"] < request.epoch:
            return ResultCode.EPOCH_STALE, event["request_epoch"]
        if event["request_epoch"] > request.epoch:
            return ResultCode.EPOCH_FUTURE, event["request_epoch"]
        if kind in (EventKind.PREEMPT, EventKind.FINISH):
            return self._leave(kind, event["request"])
        if kind in (EventKind.STAGE, EventKind.EVICT):
            if request.state != "running":
                return ResultCode.REQUEST_NOT_RUNNING, request.epoch
            return self._stage(event) if kind is EventKind.STAGE else self._evict(event)
        operation_id = event["operation_id"]
        operation = self.find(event["request"], event["request_epoch"], operation_id)
        if operation is None:
            is_past = operation_id <= request.last_operation
            code = ResultCode.OPERATION_FORGOTTEN if is_past else ResultCode.OPERATION_UNKNOWN
            return code, operation_id
        for name in ("pool_generation", "map_revision"):
            if event[name] != operation.row[name]:
                return ResultCode.OPERATION_KEY_CONFLICT, operation_id
        if kind is EventKind.RESERVE:
            return self._reserve(operation, event["slot"])
        if kind is EventKind.REACH:
            return self._reach(operation, Condition(event["condition"]), event["rank"])
        if kind is EventKind.ISSUE:
            return self._issue(operation)
        if kind is EventKind.COMMIT:
            return self._commit(operation)
        return self._ack(operation) if kind is EventKind.ACK else self._abort(operation)

    def _out_of_range(  # noqa: PLR0911
        self, kind: EventKind, event: dict[str, int]
    ) -> int | None:
        def is_outside(name: str, end: int, lowest: int = 0) -> bool:
            return not lowest <= event[name] < end

        no_request = (EventKind.RESTART, EventKind.QUIESCE)
        if kind not in no_request and is_outside("request", self.shape.max_requests):
            return event["request"]
        if kind in (EventKind.RESERVE, EventKind.EVICT, EventKind.QUIESCE):
            lowest = -1 if kind is EventKind.RESERVE else 0
            if is_outside("slot", self.shape.max_slots, lowest):
                return event["slot"]
        if kind in (EventKind.REACH, EventKind.QUIESCE):
            if is_outside("rank", self.shape.num_ranks):
                return event["rank"]
            if kind is EventKind.REACH and is_outside("condition", len(_MISSING)):
                return event["condition"]
        names_operation = EventKind.STAGE <= kind <= EventKind.ABORT
        if names_operation and is_outside("operation_id", 2**31 - 1):
            return event["operation_id"]
        if kind is EventKind.STAGE:
            if is_outside("num_slots", self.shape.max_slots + 1):
                return event["num_slots"]
            if is_outside("has_side_buffer", 2 if event["num_slots"] > 0 else 1):
                return event["has_side_buffer"]
        return None

    def _admit(self, request: ModelRequest) -> Answer:
        if request.state == "running":
            return ResultCode.REQUEST_RUNNING, request.epoch
        request.state, request.last_operation = "running", -1
        request.epoch = self.next_epoch
        self.next_epoch += 1
        return ResultCode.OK, request.epoch

    def _leave(self, kind: EventKind, number: int) -> Answer:
        request = self.requests[number]
        can_leave = request.state == "running" or (
            request.state == "preempted" and kind is EventKind.FINISH
        )
        if not can_leave:
            return ResultCode.REQUEST_NOT_RUNNING, request.epoch
        request.state = "preempted" if kind is EventKind.PREEMPT else "finished"
        self._give_up(number)
        return ResultCode.OK, -1

    def _restart(self, process_epoch: int) -> Answer:
        if process_epoch <= self.process_epoch:
            return ResultCode.PROCESS_EPOCH_MISMATCH, process_epoch
        self.process_epoch = process_epoch
        for number, request in enumerate(self.requests):
            self._give_up(number)
            request.state = "absent"
        return ResultCode.OK, -1

    def _give_up(self, number: int) -> None:
        """Nothing of a request stays: what was never issued is free, the rest retires."""
        for operation in self.places:
            if operation is not None and operation.row["request"] == number:
                if operation.stage == "committed":
                    operation.stage = "closed"
                elif operation.stage in ("staged", "issued"):
                    self._undo(operation)
        for slot in self.slots:
            if slot.request == number and slot.state == "resident":
                slot.state = "retiring"

    def _undo(self, operation: ModelOperation) -> None:
        still_used: list[ModelSlot] = []
        for slot in operation.slots:
            if slot.state == "reserved":
                slot.free()
            else:
                slot.state = "retiring"
                still_used.append(slot)
        operation.slots = still_used
        operation.stage = "draining"
        self._end_if_drained(operation)

    def _end_if_drained(self, operation: ModelOperation) -> None:
        if operation.stage == "draining" and not operation.slots:
            operation.stage, operation.has_source = "aborted", False

    def _stage(self, event: dict[str, int]) -> Answer:
        number, operation_id = event["request"], event["operation_id"]
        request = self.requests[number]
        known = self.find(number, event["request_epoch"], operation_id)
        if known is not None:
            is_same = known.row["body_digest"] == event["body_digest"]
            code = ResultCode.OPERATION_REPEATED if is_same else ResultCode.OPERATION_CONFLICT
            return code, operation_id
        if operation_id <= request.last_operation:
            return ResultCode.OPERATION_FORGOTTEN, operation_id
        pending = self.open_operation(number, "staged", "issued", "committed")
        if pending is not None:
            return ResultCode.OPERATION_OPEN, pending.operation_id
        for name, now in (
            ("pool_generation", request.generation),
            ("map_revision", request.revision),
            ("selection_revision", request.selection + 1),
        ):
            if event[name] != now:
                return ResultCode.STALE_PLAN, event[name]
        place = self._oldest_ended_place()
        if place is None:
            return ResultCode.OPERATIONS_FULL, self.shape.max_operations
        operation = ModelOperation(place, event, self.next_sequence)
        self.next_sequence += 1
        waits = [Condition.COMPLETED]
        if event["num_slots"] > 0:
            operation.has_source = True
            waits += [Condition.READERS_DONE, Condition.LANDED, Condition.TABLES_WRITTEN]
        if event["has_side_buffer"]:
            waits.append(Condition.SIDE_LANDED)
        operation.done = {condition: set() for condition in sorted(waits)}
        self.places[place] = operation
        request.last_operation = operation_id
        return ResultCode.OK, place

    def _oldest_ended_place(self) -> int | None:
        best: tuple[int, int] | None = None
        for place, known in enumerate(self.places):
            if known is None:
                return place
            if known.stage in _ENDED and (best is None or known.sequence < best[0]):
                best = (known.sequence, place)
        return None if best is None else best[1]

    def _reserve(self, operation: ModelOperation, wanted: int) -> Answer:
        if operation.stage in ("draining", "aborted"):
            return ResultCode.OPERATION_ABORTED, operation.operation_id
        if operation.stage != "staged":
            return ResultCode.OPERATION_STAGE, operation.operation_id
        if len(operation.slots) >= operation.row["num_slots"]:
            return ResultCode.RESERVATION_COMPLETE, operation.operation_id
        if wanted >= 0:
            slot = self.slots[wanted]
            if slot.state != "free":
                return ResultCode.SLOT_STATE, wanted
        else:
            free = [slot for slot in self.slots if slot.state == "free"]
            if not free:
                return ResultCode.SLOTS_EXHAUSTED, self.shape.max_slots
            slot = free[0]
        slot.state, slot.request, slot.operation = "reserved", operation.row["request"], operation
        slot.generation += 1
        operation.slots.append(slot)
        return ResultCode.OK, slot.number

    def _issue(self, operation: ModelOperation) -> Answer:
        if operation.stage in ("draining", "aborted"):
            return ResultCode.OPERATION_ABORTED, operation.operation_id
        if operation.stage != "staged":
            return ResultCode.EVENT_REPEATED, operation.operation_id
        if len(operation.slots) < operation.row["num_slots"]:
            return ResultCode.MISSING_RESERVATION, len(operation.slots)
        operation.stage = "issued"
        for slot in operation.slots:
            slot.state = "in flight"
        return ResultCode.OK, -1

    def _reach(  # noqa: PLR0911
        self, operation: ModelOperation, condition: Condition, rank: int
    ) -> Answer:
        named = operation.operation_id
        if operation.stage == "staged":
            return ResultCode.OPERATION_NOT_ISSUED, named
        if operation.stage in ("draining", "aborted"):
            return ResultCode.EVENT_LATE, named
        if operation.stage in ("committed", "closed"):
            return ResultCode.EVENT_REPEATED, named
        if condition not in operation.done:
            return ResultCode.CONDITION_UNEXPECTED, named
        if rank in operation.done[condition]:
            return ResultCode.EVENT_REPEATED, named
        first: list[Condition] = []
        if condition is Condition.TABLES_WRITTEN:
            first = [Condition.READERS_DONE, Condition.LANDED, Condition.SIDE_LANDED]
        elif condition is Condition.COMPLETED:
            first = [Condition.TABLES_WRITTEN]
        for needed in first:
            if needed in operation.done and rank not in operation.done[needed]:
                return _MISSING[needed], rank
        operation.done[condition].add(rank)
        landings = (Condition.LANDED, Condition.SIDE_LANDED)
        if all(operation.has_all(each, self.shape.num_ranks) for each in landings):
            operation.has_source = False
        return ResultCode.OK, -1

    def _commit(self, operation: ModelOperation) -> Answer:
        if operation.stage == "staged":
            return ResultCode.OPERATION_NOT_ISSUED, operation.operation_id
        if operation.stage in ("draining", "aborted"):
            return ResultCode.OPERATION_ABORTED, operation.operation_id
        if operation.stage != "issued":
            return ResultCode.EVENT_REPEATED, operation.operation_id
        for condition, ranks in operation.done.items():
            missing = set(range(self.shape.num_ranks)) - ranks
            if missing:
                return _MISSING[condition], min(missing)
        operation.stage = "committed"
        request = self.requests[operation.row["request"]]
        for slot in operation.slots:
            slot.state, slot.operation = "resident", None
        if operation.slots:
            request.generation += 1
            request.revision += 1
        operation.slots = []
        request.selection = operation.row["selection_revision"]
        return ResultCode.OK, -1

    def _ack(self, operation: ModelOperation) -> Answer:
        if operation.stage in ("staged", "issued"):
            return ResultCode.ACK_EARLY, operation.operation_id
        if operation.stage in ("draining", "aborted"):
            return ResultCode.EVENT_LATE, operation.operation_id
        if operation.stage == "closed":
            return ResultCode.EVENT_REPEATED, operation.operation_id
        operation.stage = "closed"
        return ResultCode.OK, -1

    def _abort(self, operation: ModelOperation) -> Answer:
        if operation.stage in ("committed", "closed"):
            return ResultCode.OPERATION_COMMITTED, operation.operation_id
        if operation.stage in ("draining", "aborted"):
            return ResultCode.EVENT_REPEATED, operation.operation_id
        self._undo(operation)
        return ResultCode.OK, -1

    def _evict(self, event: dict[str, int]) -> Answer:
        slot = self.slots[event["slot"]]
        if event["slot_generation"] != slot.generation:
            return ResultCode.SLOT_STALE, slot.number
        if slot.state != "free" and slot.request != event["request"]:
            return ResultCode.SLOT_OWNER, slot.number
        if slot.state != "resident":
            return ResultCode.SLOT_STATE, slot.number
        pending = self.open_operation(event["request"], "staged", "issued")
        if pending is not None:
            return ResultCode.OPERATION_OPEN, pending.operation_id
        slot.state = "retiring"
        self.requests[event["request"]].revision += 1
        return ResultCode.OK, -1

    def _quiesce(self, event: dict[str, int]) -> Answer:
        slot = self.slots[event["slot"]]
        if event["slot_generation"] != slot.generation:
            return ResultCode.SLOT_STALE, slot.number
        if slot.state != "retiring":
            return ResultCode.SLOT_STATE, slot.number
        if event["rank"] in slot.quiet:
            return ResultCode.EVENT_REPEATED, slot.number
        slot.quiet.add(event["rank"])
        if len(slot.quiet) == self.shape.num_ranks:
            operation = slot.operation
            slot.free()
            if operation is not None:
                operation.slots.remove(slot)
                self._end_if_drained(operation)
        return ResultCode.OK, -1
