"""The messages of `protocol` as JSON, every field bounded; nothing else is ever parsed."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blockcompact_jax import protocol
from blockcompact_jax.ledger.handles import OperationKey
from blockcompact_jax.protocol import SelectionUnit
from blockcompact_jax.upload import SourceKind

from .segment import RegionPlace, SegmentHandle

MAX_TOKENS = 1 << 22
"""Longest sequence that a message can carry."""
MAX_ROWS = 1 << 20
"""Most upload rows of one message."""
_MAX_INT32 = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=_MAX_INT32, strict=True)]
Positive = Annotated[int, Field(ge=1, le=_MAX_INT32, strict=True)]
Place = Annotated[int, Field(ge=-1, le=_MAX_INT32, strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
TokenIds = Annotated[list[Count], Field(min_length=1, max_length=MAX_TOKENS)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CapabilitiesWire(_Wire):
    """`protocol.Capabilities`."""

    method: Name
    protocol_version: Count
    selection_unit: SelectionUnit
    block_tokens: Count
    kv_dtype: Name
    model: Name
    layout_hash: Name
    keep_map_version: Count
    process_epoch: Count
    source_kinds: Annotated[list[SourceKind], Field(max_length=8)]

    def to_message(self) -> protocol.Capabilities:
        """Returns what was meant."""
        fields: dict[str, Any] = dict(self)
        fields["source_kinds"] = frozenset(self.source_kinds)
        return protocol.Capabilities(**fields)

    @classmethod
    def of(cls, message: protocol.Capabilities) -> CapabilitiesWire:
        """Returns the message for the wire."""
        fields: dict[str, Any] = {
            **vars(message),
            "source_kinds": sorted(message.source_kinds, key=str),
        }
        return cls(**fields)


class InitializeWire(_Wire):
    """`protocol.Initialize`."""

    capabilities: CapabilitiesWire
    is_copy_fallback_asked: Annotated[bool, Field(strict=True)] = False

    def to_message(self) -> protocol.Initialize:
        """Returns what was meant."""
        return protocol.Initialize(
            capabilities=self.capabilities.to_message(),
            is_copy_fallback_asked=self.is_copy_fallback_asked,
        )


class _RequestWire(_Wire):
    process_epoch: Count
    request_id: Name
    request_epoch: Count


class PrefillWire(_RequestWire):
    """`protocol.Prefill`."""

    operation_id: Count
    token_ids: TokenIds
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS, strict=True)]
    num_draft_tokens: Annotated[int, Field(ge=1, le=4096, strict=True)]
    num_copy_blocks: Count = 0

    def to_message(self) -> protocol.Prefill:
        """Returns what was meant."""
        fields: dict[str, Any] = {**dict(self), "token_ids": tuple(self.token_ids)}
        return protocol.Prefill(**fields)


class VerifyWire(_RequestWire):
    """`protocol.Verify`."""

    operation_id: Count
    first_token_position: Positive
    token_ids: Annotated[list[Count], Field(min_length=1, max_length=4097)]
    is_scoring: Annotated[bool, Field(strict=True)]

    def to_message(self) -> protocol.Verify:
        """Returns what was meant."""
        fields: dict[str, Any] = {**dict(self), "token_ids": tuple(self.token_ids)}
        return protocol.Verify(**fields)


class KeyWire(_RequestWire):
    """`ledger.handles.OperationKey`."""

    operation_id: Count
    pool_generation: Count
    map_revision: Count

    def to_message(self) -> OperationKey:
        """Returns what was meant."""
        return OperationKey(**dict(self))


Counts = Annotated[list[Count], Field(max_length=MAX_ROWS)]


class UploadRowsWire(_Wire):
    """`protocol.UploadRows`; the lists are equally long."""

    layer: Counts
    group: Counts
    logical_block: Counts
    source_block: Counts
    cpu_destination_block: Annotated[list[Place], Field(max_length=MAX_ROWS)]
    physical_block: Counts
    valid_tokens: Annotated[list[Positive], Field(max_length=MAX_ROWS)]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lengths = {name: len(column) for name, column in self}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns have {lengths} entries; expected equally many")
        return self

    def to_message(self) -> protocol.UploadRows:
        """Returns what was meant."""
        return protocol.UploadRows(**{name: tuple(column) for name, column in self})


class CompactionUploadWire(_Wire):
    """`protocol.CompactionUpload`."""

    key: KeyWire
    selection_revision: Count
    source_kind: SourceKind
    num_tokens: Positive
    rows: UploadRowsWire

    def to_message(self) -> protocol.CompactionUpload:
        """Returns what was meant."""
        return protocol.CompactionUpload(
            key=self.key.to_message(),
            selection_revision=self.selection_revision,
            source_kind=self.source_kind,
            num_tokens=self.num_tokens,
            rows=self.rows.to_message(),
        )


class AckWire(_Wire):
    """`protocol.Ack`."""

    key: KeyWire


class AbortWire(_Wire):
    """`protocol.Abort`."""

    key: KeyWire
    reason: Annotated[str, Field(max_length=1000)]


class FinishWire(_RequestWire):
    """`protocol.Finish`; also what a heartbeat carries."""

    def to_message(self) -> protocol.Finish:
        """Returns what was meant."""
        return protocol.Finish(**dict(self))


class RegionWire(_Wire):
    """`segment.RegionPlace`."""

    offset_bytes: Annotated[int, Field(ge=0)]
    size_bytes: Annotated[int, Field(ge=1)]


class SegmentWire(_Wire):
    """`segment.SegmentHandle`."""

    pid: Annotated[int, Field(ge=1)]
    fd: Annotated[int, Field(ge=0)]
    name: Annotated[str, Field(pattern=r"^blockcompact-[0-9a-f]{32}$")]
    size_bytes: Annotated[int, Field(ge=1)]
    regions: dict[str, RegionWire]

    def to_handle(self) -> SegmentHandle:
        """Returns what was meant."""
        regions = {name: RegionPlace(**dict(place)) for name, place in self.regions.items()}
        fields: dict[str, Any] = {**dict(self), "regions": regions}
        return SegmentHandle(**fields)

    @classmethod
    def of(cls, handle: SegmentHandle) -> SegmentWire:
        """Returns the handle for the wire."""
        regions = {name: RegionWire(**vars(place)) for name, place in handle.regions.items()}
        fields: dict[str, Any] = {**vars(handle), "regions": regions}
        return cls(**fields)


class HealthAnswer(_Wire):
    """Which process this is and what it holds."""

    process_epoch: int
    num_requests: int
    num_leases: int
    shared_bytes: int


class InitializeAnswer(_Wire):
    """What both sides do from now on."""

    process_epoch: int
    source_kind: SourceKind
    max_copy_blocks: int
    lease_seconds: float


class PrefillAnswer(_Wire):
    """The context is verified; row 0 of the logits region says what follows it."""

    num_tokens: int
    segment: SegmentWire


class VerifyAnswer(_Wire):
    """The tokens are verified; the logits and mass regions hold the rest of the answer."""

    num_tokens: int


class UploadAnswer(_Wire):
    """The sources of these rows stay as they are until the ACK or the abort."""

    num_packed_blocks: int


class DoneAnswer(_Wire):
    """It is done, or was done before."""

    is_repeated: bool


class ErrorAnswer(_Wire):
    """Why nothing was done."""

    refusal: str
    message: str
