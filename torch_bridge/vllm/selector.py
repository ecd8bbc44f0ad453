"""Selects each request's blocks from the attention mass of its own newest query."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from blockcompact_jax.errors import Result, raise_for_result
from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.scores import mass_from_log_sum_exp, reduce_heads
from blockcompact_jax.selection import SelectionPolicy, select
from torch_bridge.budget import RECENT_BLOCKS, Budget, effective_budget_blocks
from torch_bridge.policy import selection_policy
from torch_bridge.vllm.requests import DecodingRequest


class Selector:
    """Chooses the blocks of the full-attention layers of one KV-cache group.

    Attributes:
        max_blocks: columns that scores must have.
    """

    def __init__(
        self, geometry: ModelGeometry, budget: Budget, max_blocks: int, *, is_shared: bool = False
    ) -> None:
        """Compiles nothing yet; `warm_up` does.

        Args:
            geometry: of the group's layers.
            budget: blocks of a layer.
            max_blocks: of the longest sequence.
            is_shared: whether all layers select the same blocks, by the mean of their scores.
        """
        self.max_blocks = max_blocks
        self._is_shared = is_shared
        self._geometry = geometry
        self._budget = budget
        self._policy = selection_policy(max_want=effective_budget_blocks(budget, max_blocks))

    def num_candidate_blocks(self, num_tokens: int) -> int:
        """Whole blocks before the always-attended tail."""
        return max(num_tokens // self._geometry.block_tokens - RECENT_BLOCKS, 0)

    def needs_all(self, num_tokens: int) -> bool:
        """Whether the budget holds every block of a sequence: then there is nothing to choose."""
        num_whole_blocks = num_tokens // self._geometry.block_tokens
        return effective_budget_blocks(self._budget, num_whole_blocks) >= num_whole_blocks

    def warm_up(self) -> None:
        """Compiles the selection, so that no step pays for it."""
        heads = self._geometry.layer_geometry(self._geometry.full_layers[0]).num_query_heads
        self._select(np.zeros((self._geometry.num_rows, heads, self.max_blocks), np.float32), 0, 0)

    def select(
        self,
        request: DecodingRequest,
        own_blocks: Int32[np.ndarray, " own"],
        log_sum_exps: Float32[np.ndarray, "row query_head max_blocks"],
    ) -> None:
        """Gives a request its new selection.

        Args:
            request: as of the step that was scored.
            own_blocks: logical blocks that were scored, ascending; others are not selected.
            log_sum_exps: of the scaled scores of the step's query in each of them; -inf past the
                last.

        Raises:
            PlanError: for scores that are not finite; the request keeps its old selection.
        """
        num_tokens = request.num_tokens
        num_candidates = self.num_candidate_blocks(num_tokens)
        budget = effective_budget_blocks(self._budget, num_tokens // self._geometry.block_tokens)
        num_columns = int(np.searchsorted(own_blocks, num_candidates))
        want = self._select(log_sum_exps, num_columns, budget)
        request.selected = own_blocks[np.sort(want, axis=1)]
        request.is_retained = self._is_shared
        request.num_candidate_blocks = num_candidates

    def _select(
        self, log_sum_exps: Float32[np.ndarray, "row head block"], num_candidates: int, budget: int
    ) -> Int32[np.ndarray, "row want"]:
        want, num_want, result = _select(
            log_sum_exps,
            np.int32(num_candidates),
            np.int32(budget),
            geometry=self._geometry,
            policy=self._policy,
            is_shared=self._is_shared,
        )
        raise_for_result(result)
        return np.asarray(want)[:, : int(np.asarray(num_want)[0])]  # budgets are uniform


@partial(jax.jit, static_argnames=("geometry", "policy", "is_shared"))
def _select(
    log_sum_exps: Any,
    num_candidates: Any,
    budget: Any,
    *,
    geometry: ModelGeometry,
    policy: SelectionPolicy,
    is_shared: bool,
) -> tuple[jax.Array, jax.Array, Result]:
    mass = mass_from_log_sum_exp(log_sum_exps)
    if is_shared:  # one layer with the query heads of all
        num_rows, num_heads, num_blocks = mass.shape
        mass = jnp.broadcast_to(
            mass.reshape(1, num_rows * num_heads, num_blocks),
            (num_rows, num_rows * num_heads, num_blocks),
        )
    selection = select(
        reduce_heads(mass, head_reduction=policy.head_reduction),
        num_candidates,
        budget_blocks=budget,
        selection_revision=0,
        geometry=geometry,
        policy=policy,
    )
    return selection.want, selection.num_want, selection.result
