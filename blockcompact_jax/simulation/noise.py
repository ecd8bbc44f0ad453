"""Events that are wrong on purpose, and that a ledger must see through.

A lie that no ledger could see is never told: a rank does not claim work of its own that it has not
done, under the very key and generation for which it would be true.
"""

from collections.abc import Callable, Sequence
from random import Random

from blockcompact_jax.ledger.kinds import Condition, EventKind
from blockcompact_jax.ledger.state import EVENT_FIELDS, make_event

from .model import ModelLedger
from .model_parts import ModelOperation

Row = tuple[int, ...]

_PLACE = {name: place for place, name in enumerate(EVENT_FIELDS)}
_KEY_FIELDS = ("request", "request_epoch", "operation_id", "pool_generation", "map_revision")
_SPEECH = (EventKind.REACH, EventKind.QUIESCE)
_FAR = 1 << 20


class Noise:
    """Makes wrong events from what is known and from what was said before."""

    def __init__(self, random: Random, model: ModelLedger) -> None:
        """Draws from `random`; looks at `model` and never changes it."""
        self._random = random
        self._model = model
        self._ways: tuple[Callable[[Sequence[Row]], Row | None], ...] = (
            self._say_again,
            self._change_a_field,
            self._change_a_field,
            self._other_body,
            self._out_of_order,
            self._wrong_slot,
            self._early_decision,
            self._old_process,
            self._second_operation,
            self._evict_during_operation,
        )

    def make(self, recent: Sequence[Row]) -> Row | None:
        """Returns a wrong event, or None where no way of being wrong has what it needs."""
        for way in self._random.sample(self._ways, k=4):
            row = way(recent)
            if row is not None:
                return row
        return None

    def _event(self, kind: EventKind, **values: int) -> Row:
        values.setdefault("process_epoch", self._model.process_epoch)
        return make_event(kind, **values)

    def _of(self, kind: EventKind, operation: ModelOperation, **values: int) -> Row:
        key = {name: operation.row[name] for name in _KEY_FIELDS}
        return self._event(kind, **key, **values)

    def _any_operation(self) -> ModelOperation | None:
        known = [operation for operation in self._model.places if operation is not None]
        return self._random.choice(known) if known else None

    def _say_again(self, recent: Sequence[Row]) -> Row | None:
        return self._random.choice(recent) if recent else None

    def _change_a_field(self, recent: Sequence[Row]) -> Row | None:
        if not recent:
            return None
        row = list(self._random.choice(recent))
        names = list(_KEY_FIELDS)
        steps = (-1, 1, 2)
        if row[0] in _SPEECH:
            # Only what cannot be true of anything: far off, or out of range.
            names = ["slot_generation"] if row[0] == EventKind.QUIESCE else names[1:]
            names = [*names, "rank"]
            steps = (-_FAR, _FAR)
        elif row[0] == EventKind.STAGE:
            names += ["num_slots", "has_side_buffer", "selection_revision"]
        elif row[0] in (EventKind.EVICT, EventKind.RESERVE):
            names += ["slot", "slot_generation"]
        row[_PLACE[self._random.choice(names)]] += self._random.choice(steps)
        return tuple(row)

    def _other_body(self, recent: Sequence[Row]) -> Row | None:
        operation = self._any_operation()
        if operation is None:
            return None
        change = self._random.choice((0, 1))
        values = {
            name: operation.row[name]
            for name in (*_KEY_FIELDS, "selection_revision", "num_slots", "has_side_buffer")
        }
        return self._event(
            EventKind.STAGE, **values, body_digest=operation.row["body_digest"] + change
        )

    def _out_of_order(self, recent: Sequence[Row]) -> Row | None:
        """A rank speaks of a later condition before an earlier one, or of one nobody awaits."""
        operation = self._any_operation()
        if operation is None:
            return None
        rank = self._random.randrange(self._model.shape.num_ranks)
        done = operation.done
        choices = [condition for condition in Condition if condition not in done]
        first = (Condition.READERS_DONE, Condition.LANDED, Condition.SIDE_LANDED)
        if any(each in done and rank not in done[each] for each in first):
            choices.append(Condition.TABLES_WRITTEN)
        tables = Condition.TABLES_WRITTEN
        if tables in done and rank not in done[tables]:
            choices.append(Condition.COMPLETED)
        if not choices:
            return None
        condition = self._random.choice(choices)
        return self._of(EventKind.REACH, operation, rank=rank, condition=condition)

    def _wrong_slot(self, recent: Sequence[Row]) -> Row | None:
        slot = self._random.choice(self._model.slots)
        way = self._random.randrange(3)
        if way == 0 and slot.state != "retiring":
            rank = self._random.randrange(self._model.shape.num_ranks)
            values = {"slot": slot.number, "slot_generation": slot.generation, "rank": rank}
            return self._event(EventKind.QUIESCE, **values)
        operation = self._any_operation()
        if way == 1 and operation is not None:
            return self._of(EventKind.RESERVE, operation, slot=slot.number)
        number = self._random.randrange(self._model.shape.max_requests)
        return self._event(
            EventKind.EVICT,
            request=number,
            request_epoch=self._model.requests[number].epoch,
            slot=slot.number,
            slot_generation=slot.generation - self._random.randrange(2),
        )

    def _early_decision(self, recent: Sequence[Row]) -> Row | None:
        operation = self._any_operation()
        if operation is None:
            return None
        kinds = (EventKind.COMMIT, EventKind.COMMIT, EventKind.ISSUE, EventKind.ACK)
        return self._of(self._random.choice(kinds), operation)

    def _old_process(self, recent: Sequence[Row]) -> Row | None:
        process_epoch = self._model.process_epoch - self._random.randrange(2)
        if self._random.random() < 0.3:
            return self._event(EventKind.RESTART, process_epoch=process_epoch)
        if not recent:
            return None
        row = list(self._random.choice(recent))
        if row[0] in (EventKind.QUIESCE, EventKind.RESTART):
            return None
        row[_PLACE["process_epoch"]] = self._model.process_epoch - 1
        return tuple(row)

    def _second_operation(self, recent: Sequence[Row]) -> Row | None:
        """A second operation while one may be open; or one of a request that may not run."""
        number = self._random.randrange(self._model.shape.max_requests)
        request = self._model.requests[number]
        return self._event(
            EventKind.STAGE,
            request=number,
            request_epoch=request.epoch,
            operation_id=max(0, request.last_operation + self._random.choice((-1, 1))),
            pool_generation=request.generation,
            map_revision=request.revision,
            selection_revision=request.selection + self._random.choice((1, 1, 2)),
            body_digest=self._random.randrange(1 << 20),
        )

    def _evict_during_operation(self, recent: Sequence[Row]) -> Row | None:
        """What an open operation was planned on must not change under it."""
        for slot in self._model.slots:
            if slot.state == "resident" and self._model.open_operation(
                slot.request, "staged", "issued"
            ):
                return self._event(
                    EventKind.EVICT,
                    request=slot.request,
                    request_epoch=self._model.requests[slot.request].epoch,
                    slot=slot.number,
                    slot_generation=slot.generation,
                )
        return None
