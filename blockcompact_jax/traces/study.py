"""What a selection would have kept of a trace's attention, and what it would have moved.

The text after the context is walked through token by token. Every so often the newest queries
select blocks; until the next selection a query attends to the selected blocks and to the tail: the
recent blocks, the partial block and all that came since. Its recorded attention says how much of it
that is.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32

from blockcompact_jax.budget import Budget, OptionError
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.geometry import (
    ModelGeometry,
    OwnershipGranularity,
    num_candidate_blocks,
    num_whole_blocks,
)
from blockcompact_jax.retention_path import RetentionPath, check_path
from blockcompact_jax.scores import HeadReduction, reduce_heads
from blockcompact_jax.selection import LayerBudget, SelectionPolicy, SmallBudget
from blockcompact_jax.traces.planned_path import PathCounts, PlannedPath
from blockcompact_jax.traces.scores import (
    LOGIT_REDUCTIONS,
    BlockScores,
    fill_unseen,
    seen_blocks,
)
from blockcompact_jax.traces.trace import AttentionTrace

TRACE_POLICIES = ("attention", *LOGIT_REDUCTIONS, "page_bounds", "recency", "random")
"""What scores blocks. "attention" is softmax mass, as engines score; "logit_…" reduces q·k over a
block's tokens; "page_bounds" bounds it by key ranges; the last two are controls."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """How blocks are scored, selected and kept.

    Attributes:
        block_tokens: Tokens per block.
        budget: Blocks of each layer, sink and recent ones included.
        policy: One of `TRACE_POLICIES`.
        top_tokens: Tokens of a block that "logit_top_mean" averages.
        head_reduction: Over query heads and scored queries.
        sink_blocks: First blocks, always selected.
        recent_blocks: Newest whole blocks, never selected and always attended to.
        layer_budget: How the budget is spread over layers.
        resident_margin: What a challenger's score must exceed a resident block's by.
        reselect_every_tokens: Tokens between two selections.
        scored_queries: Newest recorded queries that score a selection, each of them the blocks that
            end before it.
        retention: How what is selected is kept; its counts are those of the plans.
        ownership: What one physical block spans.
        seed: Seed of "random".
    """

    block_tokens: int = 32
    budget: Budget = field(default_factory=lambda: Budget(fraction=0.25))
    policy: str = "attention"
    top_tokens: int = 1
    head_reduction: HeadReduction = HeadReduction.MEAN
    sink_blocks: int = 1
    recent_blocks: int = 1
    layer_budget: LayerBudget = LayerBudget.UNIFORM
    resident_margin: float = 0.0
    reselect_every_tokens: int = 16
    scored_queries: int = 16
    retention: RetentionPath = RetentionPath.LAYER_TABLES
    ownership: OwnershipGranularity = OwnershipGranularity.LAYER
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_tokens", "reselect_every_tokens", "scored_queries"):
            if getattr(self, name) < 1:
                raise CompactionError(f"`{name}` is {getattr(self, name)}; give at least 1.")
        if self.policy not in TRACE_POLICIES:
            raise CompactionError(
                f"`policy` is {self.policy!r}; expected one of {', '.join(TRACE_POLICIES)}."
            )
        if not 1 <= self.top_tokens <= self.block_tokens:
            raise CompactionError(
                f"`top_tokens` is {self.top_tokens} with `block_tokens` {self.block_tokens}; give "
                "1 ≤ top_tokens ≤ block_tokens."
            )
        if self.seed < 0:
            raise CompactionError(f"`seed` is {self.seed}; give at least 0.")
        check_path(self.retention, self.ownership)
        if self.retention.has_shared_table and self.layer_budget is not LayerBudget.UNIFORM:
            raise OptionError(
                f"`layer_budget` is {self.layer_budget.value!r} with `retention` "
                f"'{self.retention}', expected 'uniform': one table has as many slots for every "
                "layer"
            )
        self.selection_policy(max_blocks=0)

    def selection_policy(self, *, max_blocks: int) -> SelectionPolicy:
        """The policy of `select`, for a text of `max_blocks` blocks."""
        return SelectionPolicy(
            max_want=max_blocks,
            sink_blocks=self.sink_blocks,
            recent_blocks=self.recent_blocks,
            on_small_budget=SmallBudget.EFFECTIVE,
            layer_budget=self.layer_budget,
            # Heads and tokens are reduced before: policies that differ in that compile once.
            resident_margin=self.resident_margin,
        )


@dataclass(frozen=True, kw_only=True)
class TraceStudy:
    """What a configuration gives along a trace. Means are over steps and layers.

    A step is a recorded query after the context. "Uploads" are blocks selected that were neither
    held before nor part of the tail, and what pads them to the upload of another layer where one
    table serves several; those of the first selection are apart. None where there was no second
    selection.

    Attributes:
        num_steps: Steps measured.
        num_selections: Selections made.
        budget_blocks: Budget of the last selection, per layer, as it was applied (mean).
        mass_kept: Share of the attention that attended blocks receive.
        mass_kept_worst_layer: The same of the layer where it is least.
        worst_layer: That decoder layer.
        mass_kept_at_best: The same as `mass_kept`, had each step and layer chosen the blocks of
            most mass among the candidates, as many as were selected.
        oracle_recall: Share of those blocks that were selected; None where nothing was selected.
        attended_share: Share of the tokens that were attended to.
        selection_overlap: Share of a selection that the one before held.
        first_upload_blocks: Blocks of the first selection, a layer.
        upload_blocks_per_selection: Blocks that each later selection uploads, a layer.
        upload_bytes: Keys and values that all selections upload, in the trace's element type.
        path: What the retention path came to; its bytes are in the trace's element type too.
    """

    num_steps: int
    num_selections: int
    budget_blocks: float
    mass_kept: float
    mass_kept_worst_layer: float
    worst_layer: int
    mass_kept_at_best: float
    oracle_recall: float | None
    attended_share: float
    selection_overlap: float | None
    first_upload_blocks: float
    upload_blocks_per_selection: float | None
    upload_bytes: int
    path: PathCounts


def study_trace(scores: BlockScores, options: StudyOptions) -> TraceStudy:
    """Walks through a trace with one configuration.

    Args:
        scores: Of the trace.
        options: The configuration.

    Raises:
        CompactionError: If fewer queries than `scored_queries` were recorded before the context's
            end, the context has no block to select, or no scored query is after a candidate.
        PlanError: If a selection fails, as for a score that is not finite.
    """
    trace = scores.trace
    _check_fit(trace, options)
    walk = _Walk(scores, options)
    positions = trace.query_positions
    for query in np.flatnonzero(positions >= trace.num_context_tokens):
        num_tokens = int(positions[query])
        if walk.is_due(num_tokens):
            walk.reselect(num_tokens, int(query))
        walk.measure(int(query), num_tokens)
    return walk.result()


def _check_fit(trace: AttentionTrace, options: StudyOptions) -> None:
    num_before = int((trace.query_positions < trace.num_context_tokens).sum())
    if options.scored_queries > num_before:
        raise CompactionError(
            f"`scored_queries` is {options.scored_queries}, but the trace has {num_before} queries "
            "before the end of its context; give fewer, or record more of them."
        )
    num_candidates = num_candidate_blocks(
        trace.num_context_tokens, options.block_tokens, options.recent_blocks
    )
    if num_candidates < 1:
        raise CompactionError(
            f"`block_tokens` is {options.block_tokens} and `recent_blocks` "
            f"{options.recent_blocks}, which leave no block of the {trace.num_context_tokens} "
            "context tokens to select; give fewer."
        )


class _Walk:
    """One pass over a trace: what is selected now, and sums over steps and selections."""

    def __init__(self, scores: BlockScores, options: StudyOptions) -> None:
        trace = scores.trace
        self._trace, self._options = trace, options
        self._geometry: ModelGeometry = trace.geometry(options.block_tokens)
        self._mass = scores.of("attention", options.block_tokens)
        has_scores = options.policy not in ("recency", "random")
        self._scores = (
            scores.of(options.policy, options.block_tokens, options.top_tokens)
            if has_scores
            else None
        )
        self._max_blocks = self._mass.shape[3]
        later = trace.query_positions[trace.query_positions >= trace.num_context_tokens]
        longest_gap = int(np.diff(later).max(initial=1))
        self._path = PlannedPath(
            self._geometry,
            options.selection_policy(max_blocks=self._max_blocks),
            max_blocks=self._max_blocks,
            max_unselected_tokens=options.reselect_every_tokens + longest_gap,
            retention=options.retention,
            ownership=options.ownership,
        )
        self._random = np.random.default_rng(options.seed)
        nothing = np.zeros((trace.num_rows, self._max_blocks), bool)
        self._is_wanted: Bool[np.ndarray, "row block"] = nothing
        self._is_held: Bool[np.ndarray, "row block"] = nothing
        self._num_candidates = 0
        self._selected_at_tokens: int | None = None
        self._budget_blocks = 0.0
        self._num_selections = 0
        self._overlaps: list[float] = []
        self._uploads: list[float] = []
        self._kept: list[Float32[np.ndarray, " row"]] = []
        self._best: list[Float32[np.ndarray, " row"]] = []
        self._recalls: list[float] = []
        self._attended: list[float] = []

    def is_due(self, num_tokens: int) -> bool:
        """Whether the sequence, of `num_tokens`, selects before its next token."""
        last = self._selected_at_tokens
        return last is None or num_tokens - last >= self._options.reselect_every_tokens

    def reselect(self, num_tokens: int, query: int) -> None:
        """Selects for a sequence of `num_tokens`, from the recorded queries before `query`."""
        options, before = self._options, self._is_wanted
        whole = num_whole_blocks(num_tokens, options.block_tokens)
        self._num_candidates = num_candidate_blocks(
            num_tokens, options.block_tokens, options.recent_blocks
        )
        selection = self._path.select(
            self._reduced_scores(query),
            num_candidate_blocks=self._num_candidates,
            budget_blocks=options.budget.num_blocks(whole),
        )
        self._is_wanted, self._is_held = selection.is_wanted, selection.is_held
        self._budget_blocks = float(selection.budget_blocks.mean())
        if self._selected_at_tokens is not None:
            num_selected = np.maximum(self._is_wanted.sum(axis=1), 1)
            common = (self._is_wanted & before).sum(axis=1)
            self._overlaps.append(float((common / num_selected).mean()))
        self._uploads.append(float(selection.num_upload.mean()))
        self._selected_at_tokens = num_tokens
        self._num_selections += 1

    def _reduced_scores(self, query: int) -> Float32[np.ndarray, "row block"]:
        shape = (self._trace.num_rows, self._max_blocks)
        if self._options.policy == "recency":
            return np.tile(np.arange(self._max_blocks, dtype=np.float32), (shape[0], 1))
        if self._scores is None:
            return self._random.random(shape, dtype=np.float32)
        window = slice(query - self._options.scored_queries, query)
        scores = self._scores[:, :, window, : self._max_blocks]
        is_seen = seen_blocks(
            self._trace.query_positions[window],
            num_blocks=scores.shape[3],
            block_tokens=self._options.block_tokens,
        )
        self._check_seen(is_seen, query)
        seen = jnp.asarray(fill_unseen(scores, is_seen))
        reduced = np.asarray(reduce_heads(seen, head_reduction=self._options.head_reduction))
        missing = self._max_blocks - reduced.shape[1]  # a partial block at the end has no logits
        return np.pad(reduced, ((0, 0), (0, missing)))

    def _check_seen(self, is_seen: Bool[np.ndarray, "query block"], query: int) -> None:
        if is_seen[:, : self._num_candidates].any(axis=0).all():
            return
        positions = self._trace.query_positions
        raise CompactionError(
            f"`recent_blocks` is {self._options.recent_blocks}: at token position "
            f"{positions[query]} logical block {self._num_candidates - 1} may be selected, and the "
            f"newest recorded query, of {positions[query - 1]}, is not after it; give more, or "
            "record more queries."
        )

    def measure(self, query: int, position: int) -> None:
        """Books what the step at `position` attends to."""
        options, num_candidates = self._options, self._num_candidates
        mass = self._mass[:, :, query].mean(axis=1)
        is_attended = self._is_held.copy()
        is_attended[:, num_candidates:] = True
        self._kept.append((mass * is_attended).sum(axis=1))
        is_candidate_chosen = self._is_held[:, :num_candidates]
        num_selected = is_candidate_chosen.sum(axis=1)
        is_best = _best_mask(mass[:, :num_candidates], num_selected)
        tail_mass = mass[:, num_candidates:].sum(axis=1)
        self._best.append((mass[:, :num_candidates] * is_best).sum(axis=1) + tail_mass)
        if num_selected.any():
            self._recalls.append(float((is_candidate_chosen & is_best).sum() / num_selected.sum()))
        num_tail_tokens = position + 1 - num_candidates * options.block_tokens
        num_keys = num_selected * options.block_tokens + num_tail_tokens
        self._attended.append(float(num_keys.mean()) / (position + 1))

    def result(self) -> TraceStudy:
        """All of it."""
        by_layer = np.mean(self._kept, axis=0)
        worst_row = int(by_layer.argmin())
        path = self._path.counts()
        return TraceStudy(
            num_steps=len(self._kept),
            num_selections=self._num_selections,
            budget_blocks=self._budget_blocks,
            mass_kept=float(by_layer.mean()),
            mass_kept_worst_layer=float(by_layer[worst_row]),
            worst_layer=int(self._trace.layers[worst_row]),
            mass_kept_at_best=float(np.mean(self._best)),
            oracle_recall=_mean(self._recalls),
            attended_share=float(np.mean(self._attended)),
            selection_overlap=_mean(self._overlaps),
            first_upload_blocks=self._uploads[0],
            upload_blocks_per_selection=_mean(self._uploads[1:]),
            upload_bytes=path.metrics.h2d_bytes,
            path=path,
        )


def _best_mask(
    mass: Float32[np.ndarray, "row block"], num_best: Int32[np.ndarray, " row"]
) -> Bool[np.ndarray, "row block"]:
    """The `num_best` blocks of most mass of each row, lower blocks first where it is equal."""
    rank = np.argsort(np.argsort(-mass, axis=1, kind="stable"), axis=1, kind="stable")
    return rank < num_best[:, None]


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def rounded(study: TraceStudy, *, digits: int = 6) -> dict[str, Any]:
    """Plain JSON values; shares to so many digits, since kernels of machines differ in the last.

    The metrics of the path are left out: they have a place of their own in a report.
    """
    path = {name: value for name, value in vars(study.path).items() if name != "metrics"}
    return _rounded(vars(study), digits) | {"path": _rounded(path, digits)}


def _rounded(values: Mapping[str, Any], digits: int) -> dict[str, Any]:
    return {
        name: round(value, digits) if isinstance(value, float) else value
        for name, value in values.items()
    }
