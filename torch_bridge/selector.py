"""Selects blocks of one sequence for every full-attention layer, for all engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from blockcompact_jax.budget import RECENT_BLOCKS, SINK_BLOCKS, Budget, effective_budget_blocks
from blockcompact_jax.errors import PlanError, Result, ResultCode, raise_for_result
from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels import NativeOperations
from blockcompact_jax.scores import reduce_heads
from blockcompact_jax.selection import SelectionPolicy, select
from torch_bridge.policy import selection_policy

MIN_COLUMNS = 64
"""Scores of few blocks share one size, so that few sizes are compiled."""

MassOf = Callable[[Any], Any]
"""Traceable: scores [row, query_head, block] to attention mass of the same shape."""


def _as_they_are(scores: Any) -> Any:
    return scores


class Selector:
    """Chooses the blocks of full-attention layers that share one block size.

    Attributes:
        max_blocks: most columns of scores.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        budget: Budget,
        max_blocks: int,
        *,
        mass_of: MassOf = _as_they_are,
        is_shared: bool = False,
    ) -> None:
        """Compiles nothing yet; `warm_up` does.

        Args:
            geometry: of the layers.
            budget: blocks of a layer.
            max_blocks: of the longest sequence.
            mass_of: what turns scores into attention mass; by default they are mass.
            is_shared: whether all layers select the same blocks, by the mean of their mass.
        """
        self.max_blocks = max_blocks
        self._mass_of = mass_of
        self._is_shared = is_shared
        self._geometry = geometry
        self._budget = budget
        self._max_want = effective_budget_blocks(budget, max_blocks)

    def num_columns(self, num_blocks: int) -> int:
        """Columns for scores of so many blocks: one of few sizes that are compiled."""
        num_columns = MIN_COLUMNS
        while num_columns < num_blocks:
            num_columns *= 2
        return min(num_columns, self.max_blocks)

    def num_candidate_blocks(self, num_tokens: int) -> int:
        """Whole blocks before the always-attended tail."""
        return max(num_tokens // self._geometry.block_tokens - RECENT_BLOCKS, 0)

    def needs_all(self, num_tokens: int) -> bool:
        """Whether the budget holds every block of a sequence: then there is nothing to choose."""
        num_whole_blocks = num_tokens // self._geometry.block_tokens
        return effective_budget_blocks(self._budget, num_whole_blocks) >= num_whole_blocks

    def warm_up(self) -> None:
        """Compiles the selection for all numbers of columns, so that no step pays for it."""
        heads = self._geometry.layer_geometry(self._geometry.full_layers[0]).num_query_heads
        num_columns = 0
        while num_columns < self.max_blocks:
            num_columns = self.num_columns(num_columns + 1)
            shape = (self._geometry.num_rows, heads, num_columns)
            self.choose(np.zeros(shape, np.float32), num_tokens=0)

    def choose(
        self,
        scores: Float32[np.ndarray, "row query_head columns"],
        *,
        num_tokens: int,
        own_blocks: Int32[np.ndarray, " own"] | None = None,
    ) -> Int32[np.ndarray, "row selected"]:
        """Selects the blocks of a sequence.

        Args:
            scores: Of its logical blocks, or of `own_blocks` in their order. Each number of columns
                is compiled once; `num_columns` names few.
            num_tokens: Its length; the tail behind `num_candidate_blocks` of it is not selected.
            own_blocks: Logical blocks that have scores, ascending; None for all.

        Returns:
            Logical blocks, ascending, equally many in every layer.

        Raises:
            PlanError: For scores of candidates that are not finite.
        """
        num_candidates = self.num_candidate_blocks(num_tokens)
        if own_blocks is not None:
            num_candidates = int(np.searchsorted(own_blocks, num_candidates))
        budget = effective_budget_blocks(self._budget, num_tokens // self._geometry.block_tokens)
        want, num_want, result = _select(
            scores,
            np.int32(num_candidates),
            np.int32(budget),
            geometry=self._geometry,
            policy=selection_policy(max_want=min(self._max_want, scores.shape[2])),
            mass_of=self._mass_of,
            is_shared=self._is_shared,
        )
        if np.asarray(result.code):
            raise_for_result(self._named(result, scores, own_blocks))
        num_selected = int(np.asarray(num_want)[0])  # budgets are uniform
        columns = np.sort(np.asarray(want)[:, :num_selected], axis=1)
        return columns if own_blocks is None else own_blocks[columns]

    def num_selected(self, num_tokens: int) -> int:
        """Blocks that are selected of a sequence; the tail comes on top."""
        budget = effective_budget_blocks(self._budget, num_tokens // self._geometry.block_tokens)
        return min(budget - RECENT_BLOCKS, self.num_candidate_blocks(num_tokens))

    def choose_row(
        self, row: int, mass: Float32[np.ndarray, "query_head columns"], *, num_tokens: int
    ) -> Int32[np.ndarray, " selected"]:
        """Selects the blocks of one layer at once, in the midst of a forward, as `choose` does.

        Args:
            row: Full-attention layer row.
            mass: Of its logical blocks.
            num_tokens: As in `choose`.

        Returns:
            Logical blocks, ascending.

        Raises:
            PlanError: For scores of candidates that are not finite.
        """
        scores = mass[:, : self.num_candidate_blocks(num_tokens)].mean(0, dtype=np.float64)
        if not np.isfinite(scores).all():
            layer, block = self._geometry.full_layers[row], int(np.isfinite(scores).argmin())
            raise PlanError(ResultCode.NON_FINITE_SCORE, layer=layer, block=block)
        scores[:SINK_BLOCKS] = np.inf
        ranked = np.argsort(-scores, kind="stable")
        return np.sort(ranked[: self.num_selected(num_tokens)]).astype(np.int32)

    def _named(
        self,
        result: Result,
        scores: Float32[np.ndarray, "row query_head columns"],
        own_blocks: Int32[np.ndarray, " own"] | None,
    ) -> Result:
        """A fault of a score by its logical block and, of shared scores, by its own layer."""
        if int(np.asarray(result.code)) != ResultCode.NON_FINITE_SCORE:
            return result
        column, layer = int(np.asarray(result.block)), result.layer
        if self._is_shared:
            mass = np.asarray(self._mass_of(scores))[:, :, column]
            faulty_rows = np.flatnonzero(~np.isfinite(mass).all(axis=1))
            if faulty_rows.size:  # else only their sum is too large
                layer = np.int32(self._geometry.full_layers[int(faulty_rows[0])])
        block = column if own_blocks is None else int(own_blocks[column])
        return replace(result, layer=layer, block=np.int32(block))


@partial(jax.jit, static_argnames=("geometry", "policy", "mass_of", "is_shared"))
def _select(
    scores: Any,
    num_candidates: Any,
    budget: Any,
    *,
    geometry: ModelGeometry,
    policy: SelectionPolicy,
    mass_of: MassOf,
    is_shared: bool,
) -> tuple[jax.Array, jax.Array, Result]:
    mass = mass_of(scores)
    if is_shared:  # as one layer with the query heads of all
        num_rows, num_heads, num_blocks = mass.shape
        mass = mass.reshape(1, num_rows * num_heads, num_blocks)
    reduced = reduce_heads(mass, head_reduction=policy.head_reduction)
    selection = select(
        jnp.broadcast_to(reduced, (geometry.num_rows, reduced.shape[1])),
        num_candidates,
        budget_blocks=budget,
        selection_revision=0,
        geometry=geometry,
        policy=policy,
        operations=NativeOperations(),
    )
    return selection.want, selection.num_want, selection.result
