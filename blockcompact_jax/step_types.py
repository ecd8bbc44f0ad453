"""What a step takes and gives: its policy, its plan, its commit."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, cast

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from .diff import BlockDiffPlan
from .errors import Result
from .ids import AnyArray, PhysicalBlocks
from .operation_types import HostOperations
from .operations import PURE_OPERATIONS, PlanOperations
from .ownership import Ownership, Retirement
from .residency import Residency
from .retention import RetentionPlan, RetentionPolicy
from .selection import Selection, SelectionPolicy
from .upload import SourceKind, UploadPlan


@dataclass(frozen=True, kw_only=True)
class StepPolicy:
    """All static choices of a step. Frozen and hashable.

    Attributes:
        selection: How blocks are chosen.
        retention: What tables the engine reads; shared tables also make the layers of a group
            upload equally many blocks.
        max_upload: Static upload capacity per layer, in blocks.
        source_kind: What a transfer reads.
        operations: What ranks, compares and orders: plain JAX on any backend, or
            `kernels.NativeOperations` on CPU. The plans are the same.
    """

    selection: SelectionPolicy
    retention: RetentionPolicy
    max_upload: int
    source_kind: SourceKind = SourceKind.SOURCE_ONLY
    operations: PlanOperations = PURE_OPERATIONS

    @cached_property
    def host_operations(self) -> HostOperations | None:
        """`operations` where they can check on the host what this policy wants; None elsewhere."""
        is_able = self.selection.is_by_score_alone and hasattr(self.operations, "are_best_on_host")
        return cast(HostOperations, self.operations) if is_able else None

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        # Static arguments are hashed on every dispatch, and each enum by a function of Python's.
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Without the hash: another process hashes enums and strings differently.
        return {field.name: getattr(self, field.name) for field in fields(self)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ZeroDelta:
    """Whether a step would leave every list as it is.

    Attributes:
        is_zero: In every layer the wanted blocks are the held ones. Shape (); a NumPy bool where
            it was found on the host.
        selection_revision: Number of the selection, to publish where `is_zero`. Shape (); a NumPy
            array where it was found on the host and the residency's revision is committed to no
            device, else on the device of that revision.
    """

    is_zero: Bool[Array, ""] | np.bool_
    selection_revision: Int32[AnyArray, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One request's plan: what to select, upload, and where to.

    Attributes:
        selection: The wanted blocks.
        diff: The blocks to upload per layer.
        upload: The rows of the transfer.
        reserved: Reserved destinations per owner, HOLE padded.
        reserved_generation: Their generations, so that a late commit or abort cannot touch blocks
            that were freed and handed to another operation since.
        result: The first fault of any stage. On a fault nothing is reserved or uploaded.
    """

    selection: Selection
    diff: BlockDiffPlan
    upload: UploadPlan
    reserved: Int32[PhysicalBlocks, "owner max_upload"]
    reserved_generation: Int32[Array, "owner max_upload"]
    result: Result


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepCommit:
    """The state after a transfer landed on all ranks.

    Attributes:
        residency: New lists. With BYTE_MOVE they hold once the moves of `retention` are done.
        ownership: New reference counts.
        retention: What the retention rewrites or moves.
        retirement: What it retired and freed.
        result: The first fault. On a fault residency and ownership are the ones given.
    """

    residency: Residency
    ownership: Ownership
    retention: RetentionPlan
    retirement: Retirement
    result: Result
