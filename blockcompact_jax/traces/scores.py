"""Block scores of a trace's queries, by the host kernels, a layer at a time.

`causal_block_mass` is the attention itself: what a query gives to each block of the tokens up to
its own. `block_logits` and `page_bound_logits` are cheaper scores; there each query meets each
block, newer ones too. `seen_blocks` tells which of them a query may score, and `fill_unseen` leaves
out the others.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from jaxtyping import Bool, Float32, Int32

from blockcompact_jax.kernels import (
    AttendSegment,
    PlainStrides,
    RegisteredPool,
    host_pool_score_blocks,
    host_pool_summarize_blocks,
    raise_for_status,
)
from blockcompact_jax.scores import BlockReduction, mass_from_log_sum_exp, page_bound_scores
from blockcompact_jax.traces.trace import AttentionTrace

LOGIT_REDUCTIONS = {
    "logit_max": BlockReduction.MAX,
    "logit_mean": BlockReduction.MEAN,
    "logit_log_sum_exp": BlockReduction.LOG_SUM_EXP,
    "logit_top_mean": BlockReduction.TOP_MEAN,
}
"""Policies that reduce q·k over the tokens of a block."""


def causal_block_mass(
    trace: AttentionTrace, row: int, *, block_tokens: int
) -> Float32[np.ndarray, "query_head query block"]:
    """Softmax mass that each recorded query gives to each block, its own token included.

    Args:
        trace: The trace.
        row: Recorded layer.
        block_tokens: Tokens per block; the last block may be partial.

    Returns:
        For each head and query, masses that add up to one; 0 for blocks after the query.
    """
    queries = trace.queries[row]
    num_blocks = -(-trace.num_tokens // block_tokens)
    log_sum_exps = np.empty((*queries.shape[:2], num_blocks), np.float32)
    with _blocks_of(trace, row, block_tokens) as segment:
        for place, position in enumerate(trace.query_positions):
            result = host_pool_score_blocks(
                np.ascontiguousarray(queries[:, place : place + 1]),
                segment._replace(num_keys=int(position) + 1),
                block_reduction=BlockReduction.LOG_SUM_EXP,
                scale=float(trace.scales[row]),
            )
            raise_for_status(result.status)
            log_sum_exps[:, place] = np.asarray(result.scores)[:, 0]
    return np.array(mass_from_log_sum_exp(log_sum_exps))


def block_logits(
    trace: AttentionTrace,
    row: int,
    *,
    block_tokens: int,
    block_reduction: BlockReduction,
    top_tokens: int = 1,
) -> Float32[np.ndarray, "query_head query block"]:
    """Scaled q·k of each recorded query with each whole block, reduced over the block's tokens.

    Args:
        trace: The trace.
        row: Recorded layer.
        block_tokens: Tokens per block.
        block_reduction: Over the tokens of a block.
        top_tokens: Tokens that TOP_MEAN averages, 1 … block_tokens; unused otherwise.
    """
    is_top_mean = block_reduction is BlockReduction.TOP_MEAN
    with _blocks_of(trace, row, block_tokens) as segment:
        result = host_pool_score_blocks(
            np.ascontiguousarray(trace.queries[row]),
            segment,
            block_reduction=None if is_top_mean else block_reduction,
            scale=float(trace.scales[row]),
        )
        raise_for_status(result.status)
    scores, num_blocks = np.asarray(result.scores), trace.num_tokens // block_tokens
    if not is_top_mean:
        return scores[..., :num_blocks]
    whole = scores[..., : num_blocks * block_tokens]
    by_block = whole.reshape(*whole.shape[:2], num_blocks, block_tokens)
    return np.sort(by_block, axis=-1)[..., -top_tokens:].mean(axis=-1, dtype=np.float32)


def page_bound_logits(
    trace: AttentionTrace, row: int, *, block_tokens: int
) -> Float32[np.ndarray, "query_head query block"]:
    """Upper bounds of the scaled q·k of each query with each whole block, from key ranges.

    Args:
        trace: The trace.
        row: Recorded layer.
        block_tokens: Tokens per block.
    """
    with _blocks_of(trace, row, block_tokens) as segment:
        result = host_pool_summarize_blocks(segment)
        raise_for_status(result.status)
    num_blocks = trace.num_tokens // block_tokens
    bounds = (np.asarray(keys)[None, :, :num_blocks] for keys in result[:2])
    scores = page_bound_scores(trace.queries[row][None], *bounds)
    return np.array(scores[0]) * np.float32(trace.scales[row])


class BlockScores:
    """Scores of all recorded queries, computed once for each kind and block size."""

    def __init__(self, trace: AttentionTrace) -> None:
        """Computes nothing yet."""
        self.trace = trace
        self._block_tokens = 0
        self._known: dict[tuple[str, int], Float32[np.ndarray, "row query_head query block"]] = {}

    def of(
        self, kind: str, block_tokens: int, top_tokens: int = 1
    ) -> Float32[np.ndarray, "row query_head query block"]:
        """Scores by "attention" (over all blocks), or by another policy that reads keys.

        Args:
            kind: "attention", "page_bounds" or one of `LOGIT_REDUCTIONS`.
            block_tokens: Tokens per block. Only scores of the last block size stay in memory.
            top_tokens: Of "logit_top_mean".
        """
        if block_tokens != self._block_tokens:
            self._block_tokens, self._known = block_tokens, {}
        key = (kind, top_tokens if kind == "logit_top_mean" else 1)
        if key not in self._known:
            rows = range(self.trace.num_rows)
            self._known[key] = np.stack([self._of_row(*key, row) for row in rows])
        return self._known[key]

    def _of_row(
        self, kind: str, top_tokens: int, row: int
    ) -> Float32[np.ndarray, "query_head query block"]:
        block_tokens = self._block_tokens
        if kind == "attention":
            return causal_block_mass(self.trace, row, block_tokens=block_tokens)
        if kind == "page_bounds":
            return page_bound_logits(self.trace, row, block_tokens=block_tokens)
        return block_logits(
            self.trace,
            row,
            block_tokens=block_tokens,
            block_reduction=LOGIT_REDUCTIONS[kind],
            top_tokens=top_tokens,
        )


def seen_blocks(
    query_positions: Int32[np.ndarray, " query"], *, num_blocks: int, block_tokens: int
) -> Bool[np.ndarray, "query block"]:
    """Whether all tokens of a block are up to a query's own.

    Args:
        query_positions: Token positions of the queries.
        num_blocks: Blocks from the beginning of the text.
        block_tokens: Tokens per block.
    """
    ends = np.arange(1, num_blocks + 1) * block_tokens
    return ends <= query_positions[:, None] + 1


def fill_unseen(
    scores: Float32[np.ndarray, "row query_head query block"],
    is_seen: Bool[np.ndarray, "query block"],
) -> Float32[np.ndarray, "row query_head query block"]:
    """Scores where a query that did not see a block says what those say on average that did.

    So a maximum or a mean over queries is that over the queries that saw the block, and a sum is
    not less for a newer block.

    Args:
        scores: Of each query and block.
        is_seen: As `seen_blocks` gives it.

    Returns:
        Scores; 0 for a block that no query saw.
    """
    if is_seen.all():
        return scores
    num_seen = np.maximum(is_seen.sum(axis=0), 1).astype(np.float32)
    mean = np.where(is_seen, scores, 0).sum(axis=2, keepdims=True) / num_seen
    return np.where(is_seen, scores, mean)


@contextmanager
def _blocks_of(trace: AttentionTrace, row: int, block_tokens: int) -> Generator[AttendSegment]:
    """The keys of one layer as the blocks of a pool, in order."""
    num_heads, num_tokens, head_dim = trace.keys.shape[1:]
    num_blocks = -(-num_tokens // block_tokens)
    padded_tokens = num_blocks * block_tokens
    # Kernels want room for values; nothing ever touches it, so it costs addresses, not memory.
    memory = np.zeros((2, num_heads, padded_tokens, head_dim), trace.keys.dtype)
    memory[0, :, :num_tokens] = trace.keys[row]
    with RegisteredPool.register_plain(
        memory.ctypes.data,
        num_layers=1,
        num_blocks=num_blocks,
        num_kv_heads=num_heads,
        block_tokens=block_tokens,
        head_dim=head_dim,
        element_bytes=memory.itemsize,
        strides=PlainStrides(
            layer=memory.size,
            kv=memory[0].size,
            block=block_tokens * head_dim,
            head=padded_tokens * head_dim,
            token=head_dim,
        ),
        size_bytes=memory.nbytes,
        keepalive=memory,
        is_writable=False,
    ) as pool:
        table = np.arange(num_blocks, dtype=np.int32)
        yield AttendSegment(pool, pool.current_ord(), 0, table, num_tokens)
