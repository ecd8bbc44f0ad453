"""The ledger's state, its events and their outcomes, as arrays with a leading lane axis.

A lane is one ledger. A host ledger has one; a simulation steps many at once. All integers are
int32, all flags bool, HOLE marks an unused place.
"""

# pyright: reportUnknownMemberType=false

from collections import namedtuple
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int32

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.ids import HOLE, AnyArray

from .kinds import MAX_RANKS, Condition, Disposition, EventKind


@dataclass(frozen=True, kw_only=True)
class LedgerShape:
    """Capacities, fixed for the life of a ledger.

    Attributes:
        max_requests: Requests that may be known at once.
        max_operations: Operations that are remembered, ended ones included.
        max_slots: Physical blocks of the pool.
        num_ranks: Tensor-parallel ranks.
    """

    max_requests: int
    max_operations: int
    max_slots: int
    num_ranks: int

    def check(self) -> None:
        """Checks the capacities.

        Raises:
            CompactionError: If one is below 1, or there are more ranks than bits.
        """
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value < 1:
                raise CompactionError(f"`{entry.name}` is {value}; give at least 1.")
        if self.num_ranks > MAX_RANKS:
            raise CompactionError(
                f"`num_ranks` is {self.num_ranks}; at most {MAX_RANKS} are supported. "
                "Keep one ledger per tensor-parallel group."
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slot machine, one entry per physical block. Shape [lane, slot].

    Attributes:
        state: `SlotState` value.
        generation: Counts reservations. Whoever holds a slot names it by both.
        request: Request that holds it, HOLE when free.
        operation: Place of the operation that brings it, until its commit; HOLE otherwise.
        quiet_ranks: Ranks on which nothing reads or writes a retiring slot any more. Bit set.
    """

    state: Int32[AnyArray, "lane slot"]
    generation: Int32[AnyArray, "lane slot"]
    request: Int32[AnyArray, "lane slot"]
    operation: Int32[AnyArray, "lane slot"]
    quiet_ranks: Int32[AnyArray, "lane slot"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operation machine, one entry per remembered operation. Shape [lane, operation].

    Attributes:
        stage: `OperationStage` value.
        request: Its request; HOLE in places never used.
        request_epoch: First part of its key.
        operation_id: Second part. Grows within an epoch of a request.
        pool_generation: Third part: the generation that it was staged on.
        map_revision: Fourth part: the map revision that it was staged on.
        selection_revision: The selection that its commit publishes.
        body_digest: Digest of the body that asked for it; a retry has the same.
        num_slots: Slots it moves; 0 publishes a selection only.
        awaited: Conditions that a commit waits for. Bit set.
        reached: Ranks that reached each condition, as bit sets. Shape [lane, operation, condition].
        is_leased: Whether it holds its source blocks.
        sequence: Counts stagings; the oldest ended operation is forgotten first.
    """

    stage: Int32[AnyArray, "lane operation"]
    request: Int32[AnyArray, "lane operation"]
    request_epoch: Int32[AnyArray, "lane operation"]
    operation_id: Int32[AnyArray, "lane operation"]
    pool_generation: Int32[AnyArray, "lane operation"]
    map_revision: Int32[AnyArray, "lane operation"]
    selection_revision: Int32[AnyArray, "lane operation"]
    body_digest: Int32[AnyArray, "lane operation"]
    num_slots: Int32[AnyArray, "lane operation"]
    awaited: Int32[AnyArray, "lane operation"]
    reached: Int32[AnyArray, "lane operation condition"]
    is_leased: Bool[AnyArray, "lane operation"]
    sequence: Int32[AnyArray, "lane operation"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Requests:
    """The requests, one entry each. Shape [lane, request].

    Attributes:
        state: `RequestState` value.
        request_epoch: Epoch of the newest admission; 0 before the first.
        pool_generation: Counts commits that brought slots.
        map_revision: Counts changes of what is resident: such commits, and evictions.
        selection_revision: The newest published selection.
        last_operation_id: Largest operation ID staged in this epoch, HOLE if none.
    """

    state: Int32[AnyArray, "lane request"]
    request_epoch: Int32[AnyArray, "lane request"]
    pool_generation: Int32[AnyArray, "lane request"]
    map_revision: Int32[AnyArray, "lane request"]
    selection_revision: Int32[AnyArray, "lane request"]
    last_operation_id: Int32[AnyArray, "lane request"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LedgerState:
    """All that a ledger knows.

    Attributes:
        slots: The slot machine.
        operations: The operation machine.
        requests: The requests.
        process_epoch: Epoch of the producer that may speak. Shape [lane].
        next_request_epoch: Epoch of the next admission; no two admissions share one.
        next_sequence: Sequence of the next staging.
        counts: Events by `Disposition`. Shape [lane, disposition].
        num_ranks: Ranks that must reach each condition (static).
    """

    slots: Slots
    operations: Operations
    requests: Requests
    process_epoch: Int32[AnyArray, " lane"]
    next_request_epoch: Int32[AnyArray, " lane"]
    next_sequence: Int32[AnyArray, " lane"]
    counts: Int32[AnyArray, "lane disposition"]
    num_ranks: int = field(metadata={"static": True})

    @property
    def all_ranks(self) -> int:
        """The bit set of every rank."""
        return (1 << self.num_ranks) - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Event:
    """One event per lane; a field that the kind does not use is 0. Shape [lane].

    Attributes:
        kind: `EventKind` value.
        process_epoch: Epoch of the producer that sent it; the new one in RESTART.
        request: Place of the request.
        request_epoch: First part of the operation's key; also of request events and EVICT.
        operation_id: Second part.
        pool_generation: Third part; in STAGE the basis that becomes it.
        map_revision: Fourth part; in STAGE the basis that becomes it.
        selection_revision: STAGE: selection to publish, the request's newest plus 1.
        num_slots: STAGE: slots to move.
        has_side_buffer: STAGE: whether a side buffer travels with the slots.
        body_digest: STAGE: digest of the body, at least 0.
        rank: REACH, QUIESCE: the rank that says so.
        condition: REACH: `Condition` value.
        slot: RESERVE: the slot, or HOLE for the lowest free one. EVICT, QUIESCE: the slot.
        slot_generation: EVICT, QUIESCE: the slot's generation when it was reserved.
    """

    kind: Int32[AnyArray, " lane"]
    process_epoch: Int32[AnyArray, " lane"]
    request: Int32[AnyArray, " lane"]
    request_epoch: Int32[AnyArray, " lane"]
    operation_id: Int32[AnyArray, " lane"]
    pool_generation: Int32[AnyArray, " lane"]
    map_revision: Int32[AnyArray, " lane"]
    selection_revision: Int32[AnyArray, " lane"]
    num_slots: Int32[AnyArray, " lane"]
    has_side_buffer: Int32[AnyArray, " lane"]
    body_digest: Int32[AnyArray, " lane"]
    rank: Int32[AnyArray, " lane"]
    condition: Int32[AnyArray, " lane"]
    slot: Int32[AnyArray, " lane"]
    slot_generation: Int32[AnyArray, " lane"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one event per lane. Shape [lane].

    Attributes:
        code: `ResultCode` value; 0 if applied. With any other code only `counts` changed.
        value: If applied, the request epoch that ADMIT gave, the slot that RESERVE took, the place
            that STAGE took, otherwise HOLE. Else what the code's sentence names.
    """

    code: Int32[AnyArray, " lane"]
    value: Int32[AnyArray, " lane"]


EVENT_FIELDS = tuple(entry.name for entry in fields(Event))
"""Columns of an event table, in order."""
_Row: Any = namedtuple(  # pyright: ignore[reportUntypedNamedTuple]
    "_Row", EVENT_FIELDS, defaults=[0] * (len(EVENT_FIELDS) - 1)
)


def empty_state(shape: LedgerShape, *, num_lanes: int = 1, process_epoch: int = 1) -> LedgerState:
    """Returns ledgers in which nothing has happened.

    Args:
        shape: Capacities.
        num_lanes: Independent ledgers.
        process_epoch: Epoch of the producer at the handshake.

    Raises:
        CompactionError: If a capacity is impossible.
    """
    shape.check()

    def full(value: int, *extent: int) -> Any:
        return np.full((num_lanes, *extent), value, np.int32)

    slots, places, requests = shape.max_slots, shape.max_operations, shape.max_requests
    return LedgerState(
        slots=Slots(
            state=full(0, slots),
            generation=full(0, slots),
            request=full(HOLE, slots),
            operation=full(HOLE, slots),
            quiet_ranks=full(0, slots),
        ),
        operations=Operations(
            stage=full(0, places),
            request=full(HOLE, places),
            request_epoch=full(0, places),
            operation_id=full(HOLE, places),
            pool_generation=full(0, places),
            map_revision=full(0, places),
            selection_revision=full(0, places),
            body_digest=full(0, places),
            num_slots=full(0, places),
            awaited=full(0, places),
            reached=full(0, places, len(Condition)),
            is_leased=full(0, places).astype(bool),
            sequence=full(0, places),
        ),
        requests=Requests(
            state=full(0, requests),
            request_epoch=full(0, requests),
            pool_generation=full(0, requests),
            map_revision=full(0, requests),
            selection_revision=full(0, requests),
            last_operation_id=full(HOLE, requests),
        ),
        process_epoch=full(process_epoch),
        next_request_epoch=full(1),
        next_sequence=full(1),
        counts=full(0, len(Disposition)),
        num_ranks=shape.num_ranks,
    )


def make_event(kind: EventKind, **values: int) -> tuple[int, ...]:
    """Returns one event as a row of an event table, unnamed fields 0.

    Args:
        kind: What happens.
        **values: Fields of `Event` by name.
    """
    try:
        return _Row(int(kind), **values)
    except TypeError as error:
        name = next(iter(values.keys() - set(EVENT_FIELDS)), "kind")
        raise CompactionError(f"`{name}` is not a field of an event; see `Event`.") from error


def event_of_rows(rows: Int32[np.ndarray, "*step lane field"]) -> Event:
    """Returns a table of events, one row per lane, as one `Event` of columns.

    Args:
        rows: int32, last axis in the order of `EVENT_FIELDS`.
    """
    columns = np.moveaxis(rows, -1, 0)
    return Event(**{name: columns[place] for place, name in enumerate(EVENT_FIELDS)})
