"""How the host names things to a ledger, and what it is told."""

from dataclasses import dataclass

from blockcompact_jax.errors import CompactionError, ResultCode, describe_code
from blockcompact_jax.ids import HOLE


class LedgerError(CompactionError):
    """An event that the ledger refused. Nothing has changed.

    Attributes:
        code: The result code.
        value: What its sentence names, or HOLE.
    """

    def __init__(self, code: ResultCode, value: int) -> None:
        self.code = code
        self.value = value
        super().__init__(describe_code(code, layer=HOLE, block=value))


@dataclass(frozen=True, kw_only=True)
class OperationKey:
    """Which operation a message is about; every message carries all of it.

    Attributes:
        process_epoch: Epoch of the producer.
        request_id: The request's whole ID; no part of it is read.
        request_epoch: Its admission.
        operation_id: Grows within an epoch of a request.
        pool_generation: Generation of the residency that it was staged on.
        map_revision: Map revision that it was staged on.
    """

    process_epoch: int
    request_id: str
    request_epoch: int
    operation_id: int
    pool_generation: int
    map_revision: int


@dataclass(frozen=True, kw_only=True)
class RequestRevisions:
    """What a request has published, for the next plan to be made from.

    Attributes:
        request_epoch: Its newest admission.
        pool_generation: Commits that brought slots.
        map_revision: Changes of what is resident.
        selection_revision: The newest published selection.
    """

    request_epoch: int
    pool_generation: int
    map_revision: int
    selection_revision: int


@dataclass(frozen=True, kw_only=True)
class HeldSlot:
    """A slot as its holder names it.

    Attributes:
        slot: Physical block.
        generation: Its generation when it was reserved.
    """

    slot: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Staging:
    """What `CommitLedger.stage` did.

    Attributes:
        key: Key of the operation.
        is_repeated: Whether it had been staged before; then nothing was staged now.
        result: The stored result of a repeated one; None if there is none yet.
        failure: Why it was aborted; None if it was not.
    """

    key: OperationKey
    is_repeated: bool
    result: bytes | None
    failure: str | None
