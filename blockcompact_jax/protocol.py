"""What the two sides agree on at start, and the messages they exchange from then on.

The *producer* is the CPU side with the full KV; the *consumer* is the accelerator side with the
resident pool and the commit ledger. Types only: how messages travel is another module's matter.
"""

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any, Final

from .errors import CompactionError
from .geometry import ModelGeometry
from .ledger.handles import OperationKey
from .upload import SourceKind

PROTOCOL_VERSION: Final = 2
KEEP_MAP_VERSION: Final = 1


class SelectionUnit(enum.Enum):
    """What a selection names."""

    BLOCK = "block"
    TOKEN = "token"


class HandshakeError(CompactionError):
    """The two sides cannot work together, so nothing was started.

    Attributes:
        field: What they differ in.
        producer: The producer's value.
        consumer: The consumer's value.
    """

    def __init__(self, field: str, producer: object, consumer: object, remedy: str) -> None:
        self.field = field
        self.producer = producer
        self.consumer = consumer
        super().__init__(
            f"`{field}` is {producer!r} on the producer and {consumer!r} on the consumer. {remedy} "
            "Nothing was started."
        )


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one side says of itself. All fields but the last must be equal on both.

    Attributes:
        method: Compaction method, resolved once, at start.
        protocol_version: Version of these messages.
        selection_unit: What a selection names.
        block_tokens: Tokens per block.
        kv_dtype: KV element type by name.
        model: Name and revision of the weights.
        layout_hash: Hash of layers and groups, see `ModelGeometry.layout_hash`.
        keep_map_version: Version of the keep map.
        process_epoch: The producer's epoch: its own on its side, the one it is expected to have on
            the consumer's.
        source_kinds: What a transfer can read.
    """

    method: str
    protocol_version: int
    selection_unit: SelectionUnit
    block_tokens: int
    kv_dtype: str
    model: str
    layout_hash: str
    keep_map_version: int
    process_epoch: int
    source_kinds: frozenset[SourceKind]


_REMEDIES: Final[dict[str, str]] = {
    "method": "Start both with the same compaction method.",
    "protocol_version": "Install the same version of this package on both.",
    "selection_unit": "Start both with the same selection unit.",
    "block_tokens": "Start both with the same block size.",
    "kv_dtype": "Start both with the same KV element type.",
    "model": "Load the same weights on both.",
    "layout_hash": "Give both the same layers, groups and packed layout.",
    "keep_map_version": "Install the same version of this package on both.",
    "process_epoch": "The producer was restarted: forget its old epoch and shake hands again.",
}


@dataclass(frozen=True, kw_only=True)
class CpuPoolArea:
    """The CPU pool: source blocks are `[0, K)`, the compaction area is `[K, N)`.

    Attributes:
        num_source_blocks: K.
        num_cpu_blocks: N.
    """

    num_source_blocks: int
    num_cpu_blocks: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be gathered into the compaction area."""
        return self.num_cpu_blocks <= self.num_source_blocks


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What both sides do from now on.

    Attributes:
        capabilities: The common ones.
        source_kind: What transfers read.
        is_fallback: Whether that is the copy, because one side cannot read sources directly.
    """

    capabilities: Capabilities
    source_kind: SourceKind
    is_fallback: bool


def capabilities_of(
    geometry: ModelGeometry,
    *,
    model: str,
    process_epoch: int,
    source_kinds: frozenset[SourceKind] = frozenset({SourceKind.SOURCE_ONLY}),
    method: str = "block",
) -> Capabilities:
    """Returns what a side with this geometry says of itself.

    Args:
        geometry: Its layers, groups, block size and element type.
        model: Name and revision of its weights.
        process_epoch: The producer's epoch.
        source_kinds: What its transfers can read.
        method: Compaction method.
    """
    return Capabilities(
        method=method,
        protocol_version=PROTOCOL_VERSION,
        selection_unit=SelectionUnit.BLOCK,
        block_tokens=geometry.block_tokens,
        kv_dtype=geometry.dtype,
        model=model,
        layout_hash=geometry.layout_hash,
        keep_map_version=KEEP_MAP_VERSION,
        process_epoch=process_epoch,
        source_kinds=source_kinds,
    )


def shake_hands(
    producer: Capabilities,
    consumer: Capabilities,
    *,
    area: CpuPoolArea,
    is_copy_fallback_asked: bool = False,
) -> Agreement:
    """Compares both sides before anything starts.

    Args:
        producer: What the CPU side says.
        consumer: What the accelerator side says.
        area: The producer's CPU pool.
        is_copy_fallback_asked: Whether blocks may be gathered first where they cannot be read
            directly. Never done unasked.

    Raises:
        HandshakeError: Naming the first field in which they differ and both values.
        CompactionError: A value is impossible.
    """
    for field, remedy in _REMEDIES.items():
        ours, theirs = getattr(producer, field), getattr(consumer, field)
        if ours != theirs:
            raise HandshakeError(field, ours, theirs, remedy)
    for field in ("protocol_version", "block_tokens", "keep_map_version", "process_epoch"):
        value = getattr(producer, field)
        if value < 1:
            raise CompactionError(f"`{field}` is {value}; give at least 1 on both sides.")
    source_kind = _source_kind(producer, consumer, area, is_copy_fallback_asked)
    return Agreement(
        capabilities=dataclasses.replace(
            producer, source_kinds=producer.source_kinds & consumer.source_kinds
        ),
        source_kind=source_kind,
        is_fallback=source_kind is SourceKind.CPU_COPY,
    )


def _source_kind(
    producer: Capabilities, consumer: Capabilities, area: CpuPoolArea, is_copy_asked: bool
) -> SourceKind:
    common = producer.source_kinds & consumer.source_kinds
    if SourceKind.SOURCE_ONLY in common:
        return SourceKind.SOURCE_ONLY
    remedy = None
    if area.is_empty:
        remedy = (
            "One side cannot read source blocks directly, and the compaction area "
            f"[{area.num_source_blocks}, {area.num_cpu_blocks}) to copy them to is empty. Give it "
            "blocks: start the server with `blockcompact serve --copy-area N`; or use a side that "
            "supports source_only."
        )
    elif not is_copy_asked:
        remedy = (
            "Only copying would work, and it was not asked for. Ask for the copy fallback "
            "explicitly, or use a side that supports source_only."
        )
    elif SourceKind.CPU_COPY not in common:
        remedy = "The copy fallback was asked for, but one side cannot copy."
    if remedy is not None:
        raise HandshakeError(
            "source_kinds",
            sorted(kind.value for kind in producer.source_kinds),
            sorted(kind.value for kind in consumer.source_kinds),
            remedy,
        )
    return SourceKind.CPU_COPY


@dataclass(frozen=True, kw_only=True)
class Initialize:
    """Consumer to producer: shake hands.

    Attributes:
        capabilities: What the consumer says of itself.
        is_copy_fallback_asked: Whether the producer may gather copies where it must.
    """

    capabilities: Capabilities
    is_copy_fallback_asked: bool = False


@dataclass(frozen=True, kw_only=True)
class RequestMessage:
    """What every message about a request carries.

    Attributes:
        process_epoch: The producer's epoch that the sender knows.
        request_id: The request's whole ID; no part of it is read.
        request_epoch: Its admission.
    """

    process_epoch: int
    request_id: str
    request_epoch: int


@dataclass(frozen=True, kw_only=True)
class Prefill(RequestMessage):
    """Compute the full KV of a prompt.

    Attributes:
        operation_id: The same for every retry.
        token_ids: The prompt.
        max_tokens: Longest sequence that follows, drafts included.
        num_draft_tokens: Most tokens of one draft.
        num_copy_blocks: Blocks of the compaction area; 0 where sources are read in place.
    """

    operation_id: int
    token_ids: tuple[int, ...]
    max_tokens: int
    num_draft_tokens: int
    num_copy_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class Verify(RequestMessage):
    """Verify drafted tokens against the full KV, and score blocks if asked.

    Attributes:
        operation_id: The same for every retry; a retry draws no new random number.
        first_token_position: Position of the first token; all before it are confirmed.
        token_ids: The last chosen token, then the drafted ones.
        is_scoring: Whether the answer carries block scores.
    """

    operation_id: int
    first_token_position: int
    token_ids: tuple[int, ...]
    is_scoring: bool


@dataclass(frozen=True, kw_only=True)
class UploadRows:
    """The blocks to move: the columns of `UploadPlan`, equally long, HOLE where a row has none.

    Attributes:
        layer: Decoder layer ID.
        group: KV-cache group ID.
        logical_block: Block of the sequence.
        source_block: CPU block that holds it.
        cpu_destination_block: CPU block it is gathered into first, with CPU_COPY.
        physical_block: Accelerator block it goes to.
        valid_tokens: Tokens to write.
    """

    layer: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    logical_block: tuple[int, ...] = ()
    source_block: tuple[int, ...] = ()
    cpu_destination_block: tuple[int, ...] = ()
    physical_block: tuple[int, ...] = ()
    valid_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompactionUpload:
    """Upload blocks; the same message on the verify path and on an upload-only resume.

    Attributes:
        key: The staged operation.
        selection_revision: The selection it publishes.
        source_kind: What the transfer reads.
        num_tokens: Confirmed tokens; the producer packs their whole blocks first.
        rows: What to move; none publishes the selection only.
    """

    key: OperationKey
    selection_revision: int
    source_kind: SourceKind
    num_tokens: int
    rows: UploadRows


@dataclass(frozen=True, kw_only=True)
class Ack:
    """The consumer committed an operation; the producer may forget it."""

    key: OperationKey


@dataclass(frozen=True, kw_only=True)
class Abort:
    """An operation ends without a commit.

    Attributes:
        key: The operation.
        reason: Why, for people.
    """

    key: OperationKey
    reason: str


@dataclass(frozen=True, kw_only=True)
class Finish(RequestMessage):
    """A request ends, whatever it was doing."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """Is the producer there, and which process is it?"""


Message = Initialize | Prefill | Verify | CompactionUpload | Ack | Abort | Finish | Health


def canonical_body(message: Message) -> bytes:
    """Returns a message as canonical JSON: equal messages, and only those, have equal bytes.

    The ledger tells a retry from a conflict by this.
    """
    content = {"type": type(message).__name__, **vars(message)}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    """Returns what JSON has no word for as something that it has."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset):
        members: list[Any] = [_plain(member) for member in value]  # pyright: ignore
        return sorted(members)
    fields: dict[str, Any] = vars(value)  # pyright: ignore
    return fields  # pyright: ignore
