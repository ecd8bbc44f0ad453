"""What `pool_attend` computes, in numpy and float64: without blocks, layouts and compiled code."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class ReferenceAttention(NamedTuple):
    """Float64 results.

    Attributes:
        out: `[num_query_heads, num_queries, head_dim]`.
        weights: `[num_query_heads, num_queries, num_keys]`: softmax mass of each key.
        log_sum_exp: `[num_query_heads, num_queries]`.
    """

    out: NDArray[np.float64]
    weights: NDArray[np.float64]
    log_sum_exp: NDArray[np.float64]


def reference_attend(
    queries: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    *,
    scale: float,
    window_tokens: int = 0,
) -> ReferenceAttention:
    """Attention of the newest queries over a sequence whose last keys are the queries' own.

    Args:
        queries: `[num_query_heads, num_queries, head_dim]`.
        keys: `[num_kv_heads, num_keys, head_dim]`.
        values: As `keys`.
        scale: Softmax scale.
        window_tokens: Newest keys a query sees, its own included; 0: all.
    """
    heads_per_kv, num_queries = queries.shape[0] // keys.shape[0], queries.shape[1]
    wide = np.repeat(keys.astype(np.float64), heads_per_kv, axis=0)
    scores = scale * np.einsum("hqd,hkd->hqk", queries.astype(np.float64), wide)
    position: NDArray[np.int64] = np.arange(keys.shape[1], dtype=np.int64)
    own = position[-num_queries:, None]
    is_seen = position <= own
    if window_tokens > 0:
        is_seen &= position > own - window_tokens
    scores = np.where(is_seen, scores, -np.inf)
    maximum = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    wide = np.repeat(values.astype(np.float64), heads_per_kv, axis=0)
    out = np.einsum("hqk,hkd->hqd", weights / total, wide)
    return ReferenceAttention(out, weights / total, (maximum + np.log(total))[..., 0])


def reference_block_mass(
    weights: NDArray[np.float64], *, block_tokens: int, max_blocks: int
) -> NDArray[np.float64]:
    """Mass of each block of one segment: `weights` summed over blocks of `block_tokens` keys."""
    num_blocks = -(-weights.shape[-1] // block_tokens)
    mass = np.zeros((*weights.shape[:-1], max(num_blocks, max_blocks)))
    for block in range(num_blocks):
        tokens = slice(block * block_tokens, (block + 1) * block_tokens)
        mass[..., block] = weights[..., tokens].sum(axis=-1)
    return mass[..., :max_blocks]
