"""What a host ledger remembers of each operation, beside its state: the body, the result."""

from dataclasses import dataclass

from .handles import OperationKey

OperationName = tuple[str, int, int]
"""Request ID, request epoch and operation ID."""


@dataclass
class OperationRecord:
    """One operation that was staged.

    Attributes:
        body_digest: SHA-256 of the body that asked for it.
        key: Its key.
        result: What its commit stored.
        failure: Why it was aborted.
    """

    body_digest: bytes
    key: OperationKey
    result: bytes | None = None
    failure: str | None = None


class OperationRecords:
    """Records by name; there are as many as the ledger has places for operations."""

    def __init__(self, max_operations: int) -> None:
        """Starts empty."""
        self._record_by_name: dict[OperationName, OperationRecord] = {}
        self._name_by_place: list[OperationName | None] = [None] * max_operations

    def find(self, name: OperationName) -> OperationRecord | None:
        """Returns a record; None if the operation is unknown or forgotten."""
        return self._record_by_name.get(name)

    def of(self, key: OperationKey) -> OperationRecord:
        """Returns the record of an operation that the ledger remembers."""
        return self._record_by_name[key.request_id, key.request_epoch, key.operation_id]

    def place_of(self, name: OperationName) -> int | None:
        """Returns the ledger's place of an operation."""
        return self._name_by_place.index(name) if name in self._record_by_name else None

    def put(self, place: int, name: OperationName, record: OperationRecord) -> None:
        """Remembers an operation, and forgets the one that had its place."""
        forgotten = self._name_by_place[place]
        if forgotten is not None:
            del self._record_by_name[forgotten]
        self._name_by_place[place] = name
        self._record_by_name[name] = record
