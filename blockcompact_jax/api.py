"""The public names of `blockcompact_jax`, from the modules that define them."""

from .errors import CompactionError, PlanError, Result, ResultCode, raise_for_result
from .geometry import (
    GroupGeometry,
    LayerGeometry,
    LayerKind,
    ModelGeometry,
    OwnershipGranularity,
    TableSupport,
    num_candidate_blocks,
)
from .ids import HOLE
from .metrics import CompactionMetrics
from .operations import PURE_OPERATIONS, PlanOperations
from .ownership import Ownership, ReferenceKind, empty_ownership
from .residency import (
    Residency,
    check_residency,
    empty_residency,
    graduate,
    publish_selection,
)
from .retention import RetentionKind, RetentionPlan, RetentionPolicy, resolve
from .scores import BlockReduction, HeadReduction, reduce_heads
from .selection import LayerBudget, Selection, SelectionPolicy, SmallBudget, select
from .step import (
    StepCommit,
    StepPlan,
    StepPolicy,
    abort_step,
    commit_step,
    plan_requests,
    plan_step,
)
from .upload import SourceKind, UploadPlan
from .zero_delta import ZeroDelta, find_zero_delta

__all__ = [
    "HOLE",
    "PURE_OPERATIONS",
    "BlockReduction",
    "CompactionError",
    "CompactionMetrics",
    "GroupGeometry",
    "HeadReduction",
    "LayerBudget",
    "LayerGeometry",
    "LayerKind",
    "ModelGeometry",
    "Ownership",
    "OwnershipGranularity",
    "PlanError",
    "PlanOperations",
    "ReferenceKind",
    "Residency",
    "Result",
    "ResultCode",
    "RetentionKind",
    "RetentionPlan",
    "RetentionPolicy",
    "Selection",
    "SelectionPolicy",
    "SmallBudget",
    "SourceKind",
    "StepCommit",
    "StepPlan",
    "StepPolicy",
    "TableSupport",
    "UploadPlan",
    "ZeroDelta",
    "abort_step",
    "check_residency",
    "commit_step",
    "empty_ownership",
    "empty_residency",
    "find_zero_delta",
    "graduate",
    "num_candidate_blocks",
    "plan_requests",
    "plan_step",
    "publish_selection",
    "raise_for_result",
    "reduce_heads",
    "resolve",
    "select",
]
