"""Scores to wanted blocks: rank, budget, ranked tail.

Blocks rank by (-score, logical block), sink blocks first.
"""

# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32

from .checks import Check, first_failing
from .errors import CompactionError, Result, ResultCode, fault_if, first_fault
from .geometry import ModelGeometry
from .ids import HOLE, AnyArray, LogicalBlocks, as_logical_blocks
from .masks import place_mask
from .operation_types import HostOperations
from .operations import PURE_OPERATIONS, PlanOperations
from .ranking import rank_keys, top_mask
from .selection_policy import LayerBudget, SelectionPolicy, SmallBudget


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Selection:
    """The blocks each layer wants resident, and the next best in score order.

    On a fault all lists are empty.

    Attributes:
        want: Sink blocks ascending, then the best others by (-score, block). HOLE padded.
        num_want: Filled places of `want`.
        ranked_tail: The next best blocks in score order, not ID order. HOLE padded.
        num_ranked_tail: Filled places of `ranked_tail`.
        effective_budget_blocks: The budget that was applied: sink + ranked + recent blocks.
        num_candidate_blocks: Blocks that could be selected. Shape ().
        selection_revision: Number of this selection. Shape ().
        result: The first fault.
        policy: The policy that was applied (static).
        block_tokens: Tokens per block (static).
        max_blocks: Bound of logical block IDs: the block capacity of the scores (static).
    """

    want: Int32[LogicalBlocks, "row max_want"]
    num_want: Int32[Array, " row"]
    ranked_tail: Int32[LogicalBlocks, "row max_tail"]
    num_ranked_tail: Int32[Array, " row"]
    effective_budget_blocks: Int32[Array, " row"]
    num_candidate_blocks: Int32[Array, ""]
    selection_revision: Int32[Array, ""]
    result: Result
    policy: SelectionPolicy = field(metadata={"static": True})
    block_tokens: int = field(metadata={"static": True})
    max_blocks: int = field(metadata={"static": True})


def select(
    scores: Float32[AnyArray, "row max_blocks"],
    num_candidate_blocks: AnyArray | int,
    *,
    budget_blocks: AnyArray | int,
    selection_revision: AnyArray | int,
    geometry: ModelGeometry,
    policy: SelectionPolicy,
    is_resident: Bool[AnyArray, "row max_blocks"] | None = None,
    operations: PlanOperations = PURE_OPERATIONS,
) -> Selection:
    """Chooses the wanted blocks of every full-attention layer.

    Args:
        scores: Block scores, float32 [row, max_blocks]. Places past `num_candidate_blocks` may
            hold anything.
        num_candidate_blocks: Whole, confirmed blocks before the recent tail. Shape ().
        budget_blocks: Sink + ranked + recent blocks per layer, before the policy spreads it.
            Shape () or [row].
        selection_revision: Number of this selection. Shape ().
        geometry: Static facts; one row per full-attention layer.
        policy: Static policy.
        is_resident: Resident blocks, for `resident_margin`. Shape [row, max_blocks].
        operations: What ranks (static); the result is the same.

    Returns:
        The selection; on a fault, an empty one whose `result` says why.

    Raises:
        CompactionError: If the shape or dtype of `scores` is wrong (at trace time).
    """
    _check_scores(scores, geometry)
    num_rows, max_blocks = scores.shape
    num_candidates = jnp.asarray(num_candidate_blocks, jnp.int32)
    scores = _favour_resident(jnp.asarray(scores), policy, is_resident)
    num_want, effective_budget, budget_result = _want_counts(
        scores, num_candidates, budget_blocks, geometry=geometry, policy=policy
    )
    count_result = _candidates_fault(num_candidates, max_blocks)
    num_listed = jnp.minimum(num_want + policy.max_tail, num_candidates)
    ranking = operations.rank(
        scores,
        jnp.where(count_result.is_ok & budget_result.is_ok, num_listed, 0),
        num_candidates=num_candidates,
        num_sinks=policy.sink_blocks,
        capacity=policy.max_want + policy.max_tail,
    )
    first_bad = ranking.first_non_finite
    score_result = first_failing(
        Check(first_bad != HOLE, ResultCode.NON_FINITE_SCORE, first_bad),
        layer_by_row=geometry.layer_by_row,
    )
    result = first_fault(count_result, score_result, budget_result)
    num_want, num_listed = (jnp.where(result.is_ok, n, 0) for n in (num_want, num_listed))
    num_tail = num_listed - num_want if policy.max_tail > 0 else np.zeros(num_rows, np.int32)
    want, tail = _split(ranking.blocks, num_want, num_tail, policy)
    return Selection(
        want=as_logical_blocks(want),
        num_want=num_want,
        ranked_tail=as_logical_blocks(tail),
        num_ranked_tail=cast(Array, num_tail),
        effective_budget_blocks=jnp.broadcast_to(effective_budget, (num_rows,)),
        num_candidate_blocks=num_candidates,
        selection_revision=jnp.asarray(selection_revision, jnp.int32),
        result=result,
        policy=policy,
        block_tokens=geometry.block_tokens,
        max_blocks=max_blocks,
    )


def is_selected(
    scores: Float32[AnyArray, "row max_blocks"],
    num_candidate_blocks: AnyArray | int,
    blocks: Int32[LogicalBlocks, "row place"],
    num_blocks: Int32[AnyArray, " row"],
    *,
    budget_blocks: AnyArray | int,
    geometry: ModelGeometry,
    policy: SelectionPolicy,
    is_resident: Bool[AnyArray, "row max_blocks"] | None = None,
    operations: PlanOperations = PURE_OPERATIONS,
) -> Bool[Array, ""]:
    """Returns whether `select` would want exactly the given blocks in every row, in any order.

    It is exact for every policy, and far cheaper than `select`: nothing is ranked. Where `select`
    would give a fault the answer is False. Shape ().

    Args:
        scores: As in `select`.
        num_candidate_blocks: As in `select`.
        blocks: The blocks in question; past `num_blocks` places they may hold anything.
        num_blocks: Places that count.
        budget_blocks: As in `select`.
        geometry: As in `select`.
        policy: As in `select`. LayerBudget.SCORE_MASS ranks over all layers here too.
        is_resident: As in `select`.
        operations: What compares (static); the result is the same.

    Raises:
        CompactionError: If the shape or dtype of `scores` is wrong (at trace time).
    """
    _check_scores(scores, geometry)
    num_candidates = jnp.asarray(num_candidate_blocks, jnp.int32)
    scores = _favour_resident(jnp.asarray(scores), policy, is_resident)
    num_want, _, budget_result = _want_counts(
        scores, num_candidates, budget_blocks, geometry=geometry, policy=policy
    )
    result = first_fault(_candidates_fault(num_candidates, scores.shape[1]), budget_result)
    are_best = operations.are_best(
        scores,
        blocks,
        jnp.where(num_want == num_blocks, num_blocks, HOLE),
        num_candidates=num_candidates,
        num_sinks=policy.sink_blocks,
    )
    return result.is_ok & are_best


def is_selected_on_host(
    scores: Float32[AnyArray, "row max_blocks"],
    num_candidate_blocks: AnyArray | int,
    blocks: Int32[LogicalBlocks, "row place"],
    num_blocks: Int32[AnyArray, " row"],
    *,
    budget_blocks: AnyArray | int,
    geometry: ModelGeometry,
    policy: SelectionPolicy,
    operations: HostOperations,
) -> bool | None:
    """`is_selected` on arrays in a CPU's memory, at once and outside any trace.

    Returns:
        None where an array cannot be read in place, or has another dtype or shape than stated.

    Args:
        scores: As in `select`.
        num_candidate_blocks: As in `select`.
        blocks: As in `is_selected`.
        num_blocks: As in `is_selected`.
        budget_blocks: As in `select`.
        geometry: As in `select`.
        policy: As in `select`, and one that `is_by_score_alone`.
        operations: What compares.

    Raises:
        CompactionError: If the shape or dtype of `scores` is wrong and a count is refused as well.
    """
    num_candidates = int(num_candidate_blocks)
    if isinstance(budget_blocks, int) or budget_blocks.ndim == 0:
        num_want = _wanted_by_budget(num_candidates, int(budget_blocks), geometry, policy)
    else:
        num_want = _count_wanted(num_candidates, budget_blocks, geometry, policy)
    if num_want is None:
        _check_scores(scores, geometry)
        return False
    # Shapes are compared there: each look at one of JAX takes as long as a tenth of the check.
    return operations.are_best_on_host(
        scores,
        blocks,
        num_blocks,
        num_wanted=num_want,
        num_candidates=num_candidates,
        num_sinks=policy.sink_blocks,
    )


def _count_wanted(
    num_candidates: int,
    budget_blocks: AnyArray | int,
    geometry: ModelGeometry,
    policy: SelectionPolicy,
) -> Int32[np.ndarray, " row"] | None:
    """Returns how many blocks each row wants, on the host; None where a count is refused."""
    _, is_small, _, num_want = _spread_budget(np, budget_blocks, num_candidates, geometry, policy)
    is_refused = num_candidates < 0 or is_small.any() or (num_want > policy.max_want).any()
    return None if is_refused else num_want


# Counts repeat from step to step, and NumPy takes longer for them than the check for a small model.
_wanted_by_budget = lru_cache(maxsize=256)(_count_wanted)


def validate_whole_blocks(
    token_positions: AnyArray, block_tokens: int
) -> Int32[LogicalBlocks, " block"]:
    """Checks on the host that token positions are whole blocks, and returns the blocks.

    Args:
        token_positions: Integer token positions, block after block. Shape [block * block_tokens].
        block_tokens: Tokens per block.

    Returns:
        Logical blocks in the given order.

    Raises:
        CompactionError: If `block_tokens` < 1, the length is not a multiple of it, or a row is
            negative, misaligned, non-consecutive or repeated; each has its own message.
    """
    if block_tokens < 1:
        raise CompactionError(f"`block_tokens` is {block_tokens}; give at least 1.")
    positions = np.asarray(token_positions)
    if positions.ndim != 1 or not (
        np.issubdtype(positions.dtype, np.integer) or positions.size == 0
    ):
        raise CompactionError(
            f"`token_positions` has shape {positions.shape} and dtype {positions.dtype}; "
            "give one list of integers."
        )
    if positions.size % block_tokens != 0:
        raise CompactionError(
            f"`token_positions` has {positions.size} entries, not a multiple of `block_tokens` "
            f"{block_tokens}; give whole blocks only."
        )
    rows = positions.astype(np.int64).reshape(-1, block_tokens)
    first = rows[:, 0]
    _refuse_rows(first < 0, first, "starts at the negative position")
    _refuse_rows(first % block_tokens != 0, first, "is misaligned: it starts at position")
    consecutive = (rows == first[:, None] + np.arange(block_tokens)).all(axis=1)
    _refuse_rows(~consecutive, first, "is not consecutive from position")
    blocks = first // block_tokens
    _, first_seen = np.unique(blocks, return_index=True)
    is_repeated = np.ones(blocks.shape, bool)
    is_repeated[first_seen] = False
    _refuse_rows(is_repeated, first, "repeats the block that starts at position")
    return as_logical_blocks(blocks.astype(np.int32))


def _refuse_rows(is_bad: np.ndarray, first: np.ndarray, fault: str) -> None:
    if is_bad.any():
        row = int(np.flatnonzero(is_bad)[0])
        raise CompactionError(
            f"Row {row} of `token_positions` {fault} {int(first[row])}; "
            "give aligned, consecutive, distinct whole blocks."
        )


def _check_scores(scores: AnyArray, geometry: ModelGeometry) -> None:
    if scores.ndim != 2 or scores.shape[0] != geometry.num_rows:
        raise CompactionError(
            f"`scores` has shape {scores.shape}; expected [{geometry.num_rows}, max_blocks], one "
            "row per full-attention layer. Reduce heads first with `reduce_heads`."
        )
    if scores.dtype != np.float32:
        raise CompactionError(
            f"`scores` has dtype {scores.dtype}; scores are float32. Cast them explicitly."
        )


def _candidates_fault(num_candidates: Int32[Array, ""], max_blocks: int) -> Result:
    is_outside = (num_candidates < 0) | (num_candidates > max_blocks)
    return fault_if(is_outside, ResultCode.CANDIDATES_OUT_OF_RANGE, block=num_candidates)


def _split(
    listed: Int32[Array, "row listed"],
    num_want: Int32[Array, " row"],
    num_tail: Int32[AnyArray, " row"],
    policy: SelectionPolicy,
) -> tuple[Int32[Array, "row max_want"], Int32[AnyArray, "row max_tail"]]:
    """Splits ranked lists into the first `num_want` and the `num_tail` after them."""
    want = jnp.where(place_mask(num_want, policy.max_want), listed[:, : policy.max_want], HOLE)
    if policy.max_tail == 0:
        return want, np.empty((want.shape[0], 0), np.int32)
    tail_place = num_want[:, None] + jnp.arange(policy.max_tail, dtype=jnp.int32)
    tail = jnp.take_along_axis(listed, tail_place, axis=1)
    return want, jnp.where(place_mask(num_tail, policy.max_tail), tail, HOLE)


def _favour_resident(
    scores: Array, policy: SelectionPolicy, is_resident: AnyArray | None
) -> Float32[Array, "row block"]:
    """Adds the margin to the finite scores of resident blocks."""
    if policy.resident_margin == 0.0 or is_resident is None:
        return scores
    raised = scores + np.float32(policy.resident_margin)
    raised = jnp.minimum(raised, np.finfo(np.float32).max)
    return jnp.where(is_resident & jnp.isfinite(scores), raised, scores)


def _want_counts(
    scores: Float32[Array, "row block"],
    num_candidates: Int32[Array, ""],
    budget_blocks: AnyArray | int,
    *,
    geometry: ModelGeometry,
    policy: SelectionPolicy,
) -> tuple[Int32[Array, " row"], Int32[Array, " row"], Result]:
    """Returns how many blocks each row wants, its effective budget, and the first fault."""
    budget, is_small, effective, num_want = _spread_budget(
        jnp, budget_blocks, num_candidates, geometry, policy
    )
    if policy.layer_budget is LayerBudget.SCORE_MASS:
        keys = rank_keys(scores, num_candidates, policy.sink_blocks)
        best = top_mask(keys.reshape(1, -1), jnp.sum(num_want)[None])
        num_want = jnp.sum(best.reshape(keys.shape), axis=1, dtype=jnp.int32)
        effective = num_want + policy.recent_blocks
    result = first_failing(
        Check(is_small, ResultCode.BUDGET_TOO_SMALL, budget),
        Check(num_want > policy.max_want, ResultCode.WANT_EXCEEDS_CAPACITY, num_want),
        layer_by_row=geometry.layer_by_row,
    )
    return num_want, effective, result


def _spread_budget(
    numpy: Any,
    budget_blocks: AnyArray | int,
    num_candidates: AnyArray | int,
    geometry: ModelGeometry,
    policy: SelectionPolicy,
) -> tuple[Any, Any, Any, Any]:
    """Returns per row the budget, whether it is too small, the effective one and what it wants.

    `numpy` is `jax.numpy`, or NumPy itself on the host.
    """
    budget = numpy.broadcast_to(numpy.asarray(budget_blocks, np.int32), (geometry.num_rows,))
    if policy.layer_budget is LayerBudget.PYRAMID:
        budget = budget + _pyramid_offsets(budget, policy.pyramid_percent)
    smallest = policy.sink_blocks + policy.recent_blocks
    least = smallest if policy.on_small_budget is SmallBudget.ERROR else 0
    effective = numpy.maximum(budget, smallest)
    num_most = numpy.maximum(numpy.asarray(num_candidates, np.int32), 0)
    num_want = numpy.minimum(numpy.maximum(effective - policy.recent_blocks, 0), num_most)
    return budget, budget < least, effective, num_want


def _pyramid_offsets(budget: Any, percent: int) -> Any:
    """Returns what each row gains: linear from +percent to -percent, equal budgets sum to 0."""
    num_rows = budget.shape[0]
    slope = np.arange(num_rows - 1, -num_rows, -2, dtype=np.int32)
    size = budget * percent * np.abs(slope) // (100 * max(num_rows - 1, 1))
    return np.sign(slope) * size
