"""The parts of the second ledger, and its state as the numbers that a first one would hold."""

from dataclasses import dataclass, field

from blockcompact_jax.ledger.kinds import Condition

_STATE_NUMBERS = {"free": 0, "reserved": 1, "in flight": 2, "resident": 3, "retiring": 4}
_STAGE_NUMBERS = {
    "staged": 1,
    "issued": 2,
    "committed": 3,
    "draining": 4,
    "closed": 5,
    "aborted": 6,
}
_REQUEST_NUMBERS = {"absent": 0, "running": 1, "preempted": 2, "finished": 3}


@dataclass(slots=True)
class ModelSlot:
    """A physical block: what it is doing and for whom."""

    number: int
    state: str = "free"
    generation: int = 0
    request: int = -1
    operation: "ModelOperation | None" = None
    quiet: set[int] = field(default_factory=set[int])

    def free(self) -> None:
        """Gives the slot back."""
        self.state, self.request, self.operation = "free", -1, None
        self.quiet.clear()


@dataclass(slots=True)
class ModelOperation:
    """One staged change of a request."""

    place: int
    row: dict[str, int]
    sequence: int
    stage: str = "staged"
    has_source: bool = False
    slots: list[ModelSlot] = field(default_factory=list[ModelSlot])
    done: dict[Condition, set[int]] = field(default_factory=dict[Condition, set[int]])

    @property
    def operation_id(self) -> int:
        """Its ID within the request's epoch."""
        return self.row["operation_id"]

    def has_all(self, condition: Condition, num_ranks: int) -> bool:
        """Whether no rank lacks a condition, or nobody waits for it."""
        return condition not in self.done or len(self.done[condition]) == num_ranks


@dataclass(slots=True)
class ModelRequest:
    """What one request has published."""

    state: str = "absent"
    epoch: int = 0
    generation: int = 0
    revision: int = 0
    selection: int = 0
    last_operation: int = -1


def encode_slot(slot: ModelSlot) -> tuple[int, ...]:
    """Returns a slot as the columns of `Slots`."""
    place = -1 if slot.operation is None else slot.operation.place
    quiet = sum(1 << rank for rank in slot.quiet)
    return _STATE_NUMBERS[slot.state], slot.generation, slot.request, place, quiet


def encode_operation(operation: ModelOperation | None) -> tuple[int, ...]:
    """Returns a remembered operation as the columns of `Operations`."""
    if operation is None:
        return (0, -1, 0, -1, *([0] * (8 + len(Condition))))
    row = operation.row
    return (
        _STAGE_NUMBERS[operation.stage],
        row["request"],
        row["request_epoch"],
        row["operation_id"],
        row["pool_generation"],
        row["map_revision"],
        row["selection_revision"],
        row["body_digest"],
        row["num_slots"],
        sum(1 << condition for condition in operation.done),
        *(sum(1 << rank for rank in operation.done.get(each, ())) for each in Condition),
        int(operation.has_source),
        operation.sequence,
    )


def encode_request(request: ModelRequest) -> tuple[int, ...]:
    """Returns a request as the columns of `Requests`."""
    return (
        _REQUEST_NUMBERS[request.state],
        request.epoch,
        request.generation,
        request.revision,
        request.selection,
        request.last_operation,
    )
