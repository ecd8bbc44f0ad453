"""One simulated world: a scheduler, ranks that copy, and a network that delays, drops and repeats.

A world is a deterministic function of its seed. It asks the second ledger (`model`) what became of
each event, as a real scheduler asks the first. It also keeps what the ledgers cannot see: which
copy is still running into which slot, and what bytes each rank's slots hold. A copy that lands in a
slot that was handed on, or a commit without its bytes, is a breach of the design itself.
"""

from collections import deque
from dataclasses import dataclass
from random import Random

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ledger.kinds import Condition, EventKind
from blockcompact_jax.ledger.state import EVENT_FIELDS, LedgerShape, make_event

from .model import ModelLedger
from .model_parts import ModelOperation, ModelSlot
from .noise import Noise

FAULTS = ("delay", "drop", "duplicate", "reorder", "crash", "restart")
"""What may go wrong. Without any, every message arrives at once and in order."""

_KIND = 0
_OPERATION_PLACES = tuple(
    EVENT_FIELDS.index(name) for name in ("request", "request_epoch", "operation_id")
)
_KEY_FIELDS = ("request", "request_epoch", "operation_id", "pool_generation", "map_revision")

Row = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """What a world is like.

    Attributes:
        shape: Capacities of the ledger.
        faults: Members of `FAULTS`.
        invalid_percent: Of 100 events, how many are wrong on purpose.
    """

    shape: LedgerShape
    faults: frozenset[str] = frozenset(FAULTS)
    invalid_percent: int = 10


class World:
    """Gives one event after another; see the module."""

    def __init__(self, seed: int, options: WorldOptions) -> None:
        """Starts a world in which nothing has happened."""
        self.options = options
        self.model = ModelLedger(options.shape)
        self.breaches: list[str] = []
        self.num_invalid = 0
        self._random = Random(seed)
        self._noise = Noise(self._random, self.model)
        self._network: list[Row] = []
        self._recent: deque[Row] = deque(maxlen=24)
        num_ranks = options.shape.num_ranks
        # Generation of the copy that runs into a slot, and of the bytes that lie there, by rank.
        self._running: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        self._bytes: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        # What each rank has done for an operation, whether or not the ledger knows it.
        self._done: dict[int, list[set[Condition]]] = {}

    def step(self) -> tuple[Row, ResultCode, int]:
        """Makes the next event and applies it to the model.

        Returns:
            The event, and the code and value that the ledger must give.
        """
        row = None
        if self._chance(self.options.invalid_percent):
            row = self._noise.make(self._recent)
            self.num_invalid += row is not None
        while row is None:
            row = self._next_row()
        code, value = self.model.apply(row)
        if code is ResultCode.OK:
            self._follow(row)
        self._recent.append(row)
        return row, code, value

    def _chance(self, percent: int) -> bool:
        return self._random.random() * 100 < percent

    def _next_row(self) -> Row | None:
        if self._network and self._chance(50):
            return self._deliver()
        if "restart" in self.options.faults and self._random.random() < 0.002:
            return self._event(EventKind.RESTART, process_epoch=self.model.process_epoch + 1)
        if "crash" in self.options.faults and self._random.random() < 0.004:
            self._crash(self._random.randrange(self.options.shape.num_ranks))
        if self._chance(30):
            row = self._quiesce()
            if row is not None:
                return row
        return self._schedule(self._random.randrange(self.options.shape.max_requests))

    def _event(self, kind: EventKind, **values: int) -> Row:
        values.setdefault("process_epoch", self.model.process_epoch)
        return make_event(kind, **values)

    def _of(self, kind: EventKind, operation: ModelOperation, **values: int) -> Row:
        for name in _KEY_FIELDS:
            values[name] = operation.row[name]
        return self._event(kind, **values)

    def _send(self, row: Row) -> Row | None:
        """Puts a message on the network; without delay it arrives now."""
        if "delay" not in self.options.faults or self._chance(30):
            return row
        if len(self._network) < 40:
            self._network.append(row)
        return None

    def _deliver(self) -> Row | None:
        faults = self.options.faults
        place = self._random.randrange(len(self._network)) if "reorder" in faults else 0
        row = self._network[place]
        if "duplicate" in faults and self._chance(15):
            return row
        del self._network[place]
        return None if "drop" in faults and self._chance(10) else row

    def _crash(self, rank: int) -> None:
        """A rank dies with its copies; the replacement starts without any."""
        self._running[rank].clear()
        for done in self._done.values():
            done[rank].clear()

    def _schedule(self, number: int) -> Row | None:
        request = self.model.requests[number]
        if request.state != "running":
            if request.state == "preempted" and self._chance(20):
                return self._request_event(EventKind.FINISH, number)
            return self._event(EventKind.ADMIT, request=number)
        chance = self._random.random()
        if chance < 0.024:
            kind = EventKind.FINISH if chance < 0.012 else EventKind.PREEMPT
            return self._request_event(kind, number)
        operation = self.model.open_operation(number, "staged", "issued", "committed")
        if operation is None:
            return self._evict(number) if chance < 0.4 else self._stage(number)
        if chance < 0.034:
            return self._of(EventKind.ABORT, operation)
        return self._advance(operation)

    def _advance(self, operation: ModelOperation) -> Row | None:
        if operation.stage == "committed":
            return self._send(self._of(EventKind.ACK, operation))
        if operation.stage == "issued":
            return self._progress(operation)
        if len(operation.slots) == operation.row["num_slots"]:
            return self._of(EventKind.ISSUE, operation)
        free = [slot.number for slot in self.model.slots if slot.state == "free"]
        if not free and self._chance(60):
            return self._of(EventKind.ABORT, operation)
        slot = self._random.choice(free) if free and self._chance(40) else -1
        return self._of(EventKind.RESERVE, operation, slot=slot)

    def _request_event(self, kind: EventKind, number: int) -> Row:
        epoch = self.model.requests[number].epoch
        return self._event(kind, request=number, request_epoch=epoch)

    def _stage(self, number: int) -> Row | None:
        request = self.model.requests[number]
        num_slots = self._random.choice((0, 1, 1, 2, 3))
        return self._send(
            self._event(
                EventKind.STAGE,
                request=number,
                request_epoch=request.epoch,
                operation_id=request.last_operation + self._random.choice((1, 1, 1, 2)),
                pool_generation=request.generation,
                map_revision=request.revision,
                selection_revision=request.selection + 1,
                num_slots=min(num_slots, self.options.shape.max_slots),
                has_side_buffer=int(num_slots > 0 and self._chance(25)),
                body_digest=self._random.randrange(1 << 20),
            )
        )

    def _evict(self, number: int) -> Row | None:
        request = self.model.requests[number]
        held = [
            slot for slot in self.model.slots if slot.request == number and slot.state == "resident"
        ]
        if not held:
            return None
        slot = self._random.choice(held)
        return self._event(
            EventKind.EVICT,
            request=number,
            request_epoch=request.epoch,
            slot=slot.number,
            slot_generation=slot.generation,
        )

    def _progress(self, operation: ModelOperation) -> Row | None:
        """A rank does its next piece of work and says so; or says again what got lost."""
        rank = self._random.randrange(self.options.shape.num_ranks)
        done = self._done[operation.sequence][rank]
        todo = [condition for condition in operation.done if condition not in done]
        unsaid = [each for each in done if rank not in operation.done[each]]
        if unsaid and (not todo or self._chance(40)):
            condition = min(unsaid)
        elif todo:
            condition = todo[0]
            if condition < Condition.TABLES_WRITTEN:
                condition = self._random.choice(
                    [each for each in todo if each < Condition.TABLES_WRITTEN]
                )
            if condition is Condition.LANDED:
                slots = [(slot.number, slot.generation) for slot in operation.slots]
                if any(self._running[rank].get(slot) != given for slot, given in slots):
                    return self._of(EventKind.ABORT, operation)  # Its copy died with a rank.
                for slot, _ in slots:
                    self._land(rank, slot)
            done.add(condition)
        elif all(operation.has_all(each, self.options.shape.num_ranks) for each in operation.done):
            return self._of(EventKind.COMMIT, operation)
        else:
            return None
        return self._send(self._of(EventKind.REACH, operation, rank=rank, condition=condition))

    def _land(self, rank: int, number: int) -> None:
        generation = self._running[rank].pop(number)
        slot = self.model.slots[number]
        self._bytes[rank][number] = generation
        if slot.generation != generation or slot.state not in ("in flight", "retiring"):
            self.breaches.append(
                f"a copy of generation {generation} landed on rank {rank} in slot {number}, which "
                f"is {slot.state} in generation {slot.generation}"
            )

    def _quiesce(self) -> Row | None:
        """A rank whose copy into a retiring slot has ended says so."""
        retiring = [slot for slot in self.model.slots if slot.state == "retiring"]
        if not retiring:
            return None
        slot = self._random.choice(retiring)
        loud = [rank for rank in range(self.options.shape.num_ranks) if rank not in slot.quiet]
        rank = self._random.choice(loud)
        if slot.number in self._running[rank]:
            self._land(rank, slot.number)
            return None
        return self._send(self._quiet_event(slot, rank))

    def _quiet_event(self, slot: ModelSlot, rank: int) -> Row:
        return self._event(
            EventKind.QUIESCE, slot=slot.number, slot_generation=slot.generation, rank=rank
        )

    def _follow(self, row: Row) -> None:
        """Does what an applied event means for copies and bytes."""
        kind = row[_KIND]
        if kind not in (EventKind.ISSUE, EventKind.COMMIT):
            return
        request, epoch, operation_id = (row[place] for place in _OPERATION_PLACES)
        operation = self.model.find(request, epoch, operation_id)
        if operation is None:
            return
        if kind == EventKind.ISSUE:
            self._done[operation.sequence] = [set() for _ in self._running]
            for running in self._running:
                running.update({slot.number: slot.generation for slot in operation.slots})
            return
        self._done.pop(operation.sequence, None)
        for slot in self.model.slots:
            if slot.state == "resident" and slot.request == request:
                for rank, held in enumerate(self._bytes):
                    if held.get(slot.number) != slot.generation:
                        self.breaches.append(
                            f"slot {slot.number} was committed in generation {slot.generation}, "
                            f"but rank {rank} holds {held.get(slot.number)}"
                        )
