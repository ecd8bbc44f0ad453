"""Scores of whole blocks, per full-attention layer, from attention mass, tokens or page bounds.

Sums run in one fixed order (pairwise halving), and means multiply by a reciprocal, so the same
input gives the same bits on every backend and batch size.
"""

# pyright: reportUnknownMemberType=false

import enum
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Float32

from .errors import CompactionError
from .ids import AnyArray


class HeadReduction(enum.Enum):
    """How query heads (and draft positions) of a layer combine into one score."""

    MAX = "max"
    MEAN = "mean"
    SUM = "sum"


class BlockReduction(enum.Enum):
    """How the token scores of a block combine into one score."""

    MAX = "max"
    MEAN = "mean"
    SUM = "sum"
    TOP_MEAN = "top_mean"
    LOG_SUM_EXP = "log_sum_exp"


def reduce_heads(
    block_mass: AnyArray, *, head_reduction: HeadReduction
) -> Float32[Array, "row block"]:
    """Reduces per-head block scores to one score per layer row and block.

    Args:
        block_mass: Shape [row, query_head, block] or [row, query_head, draft_position, block],
            float32. All query heads of a GQA group count, each on its own.
        head_reduction: Taken over heads and draft positions together.

    Raises:
        CompactionError: If the rank or dtype is another.
    """
    _check_float32("block_mass", block_mass)
    if block_mass.ndim not in (3, 4):
        raise CompactionError(
            f"`block_mass` has shape {block_mass.shape}; expected [row, query_head, block] or "
            "[row, query_head, draft_position, block]."
        )
    num_rows, *heads, num_blocks = block_mass.shape
    by_head = jnp.reshape(block_mass, (num_rows, math.prod(heads), num_blocks))
    heads_first = jnp.moveaxis(by_head, 1, 0)
    return _reduce_first_axis(heads_first, head_reduction)


def reduce_over_ranks(
    scores: Float32[AnyArray, "row block"], *, rank_axis: str, head_reduction: HeadReduction
) -> Float32[Array, "row block"]:
    """Combines block scores over tensor-parallel ranks, before anything is ranked.

    For use inside `shard_map`, where each rank has the scores of its own query heads. Every rank
    gets the same bits, so every rank selects the same blocks. Sums run in one fixed order, whatever
    order the backend's all-reduce has; another number of ranks may round a SUM or MEAN differently,
    a MAX never.

    Args:
        scores: This rank's scores, float32 [row, block], as `reduce_heads` gives them. All ranks
            have equally many heads.
        rank_axis: Name of the mesh axis of the ranks.
        head_reduction: The reduction `reduce_heads` was called with.

    Returns:
        Scores over the heads of all ranks, replicated over `rank_axis`.

    Raises:
        CompactionError: If the rank or dtype of `scores` is another.
    """
    _check_float32("scores", scores)
    if scores.ndim != 2:
        raise CompactionError(f"`scores` has shape {scores.shape}; expected [row, block].")
    num_ranks = lax.axis_size(rank_axis)
    num_rows, num_blocks = scores.shape
    share = -(-num_blocks // num_ranks)
    padded = jnp.pad(jnp.asarray(scores), ((0, 0), (0, share * num_ranks - num_blocks)))
    # Each rank reduces its share of the blocks, in rank order, then hands it to all: the shares lie
    # apart, so the all-reduce adds only zeros, and a NaN of one rank reaches all.
    by_share = padded.reshape(num_rows, num_ranks, share)
    by_rank = lax.all_to_all(by_share, rank_axis, split_axis=1, concat_axis=0, tiled=True)
    by_rank = by_rank.reshape(num_ranks, num_rows, share)
    mine = _reduce_first_axis(by_rank, head_reduction)
    is_own_share = jnp.arange(num_ranks, dtype=jnp.int32) == lax.axis_index(rank_axis)
    placed = jnp.where(is_own_share[None, :, None], mine[:, None, :], jnp.float32(0.0))
    joined = jnp.asarray(lax.psum(placed, rank_axis))
    return joined.reshape(num_rows, share * num_ranks)[:, :num_blocks]


def block_scores_from_tokens(
    token_scores: AnyArray,
    *,
    block_tokens: int,
    block_reduction: BlockReduction,
    head_reduction: HeadReduction,
    top_tokens: int = 1,
) -> Float32[Array, "row block"]:
    """Reduces token scores to block scores, blocks first and heads second.

    Only whole blocks get a score: tokens past the last whole block of the capacity do not count,
    and the selection masks blocks past `num_candidate_blocks`.

    Args:
        token_scores: Shape [row, query_head, token_position], float32.
        block_tokens: Tokens per block.
        block_reduction: Taken over the tokens of a block.
        head_reduction: Taken over query heads.
        top_tokens: Tokens that TOP_MEAN averages, 1 … block_tokens; unused otherwise.

    Raises:
        CompactionError: If the rank, dtype or `top_tokens` is out of range.
    """
    _check_float32("token_scores", token_scores)
    if token_scores.ndim != 3:
        raise CompactionError(
            f"`token_scores` has shape {token_scores.shape}; expected "
            "[row, query_head, token_position]."
        )
    if block_tokens < 1 or not 1 <= top_tokens <= block_tokens:
        raise CompactionError(
            f"`top_tokens` is {top_tokens} with `block_tokens` {block_tokens}; "
            "give 1 ≤ top_tokens ≤ block_tokens."
        )
    num_rows, num_heads, num_tokens = token_scores.shape
    num_blocks = num_tokens // block_tokens
    whole = jnp.asarray(token_scores)[..., : num_blocks * block_tokens]
    blocks = jnp.reshape(whole, (num_rows, num_heads, num_blocks, block_tokens))
    tokens_first = jnp.moveaxis(blocks, -1, 0)
    match block_reduction:
        case BlockReduction.MAX:
            reduced = jnp.max(tokens_first, axis=0)
        case BlockReduction.SUM:
            reduced = _sum_first_axis(tokens_first)
        case BlockReduction.MEAN:
            reduced = _mean_first_axis(tokens_first)
        case BlockReduction.LOG_SUM_EXP:
            reduced = _log_sum_exp_first_axis(tokens_first)
        case BlockReduction.TOP_MEAN:
            descending = -jnp.sort(-tokens_first, axis=0)
            reduced = _mean_first_axis(descending[:top_tokens])
    return reduce_heads(reduced, head_reduction=head_reduction)


def mass_from_log_sum_exp(
    log_sum_exps: AnyArray,
) -> Float32[Array, "row query_head block"]:
    """Softmax mass of each block, from the log-sum-exp of the scaled scores of its tokens.

    Args:
        log_sum_exps: Shape [row, query_head, block], float32; -inf where there is no token. NaN and
            +inf stay where they are and count nothing elsewhere, so that a selection can name them.

    Returns:
        For each head, masses that add up to one over all blocks.

    Raises:
        CompactionError: If the dtype is another.
    """
    _check_float32("log_sum_exps", log_sum_exps)
    given = jnp.asarray(log_sum_exps)
    is_finite = jnp.isfinite(given)
    maximum = jnp.max(jnp.where(is_finite, given, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.exp(given - jnp.where(jnp.isfinite(maximum), maximum, 0.0))
    total = _sum_first_axis(jnp.moveaxis(jnp.where(is_finite, weights, 0.0), -1, 0))
    return weights / total[..., None]


def page_bounds(
    keys: AnyArray, *, block_tokens: int
) -> tuple[Float[Array, "row kv_head block dim"], Float[Array, "row kv_head block dim"]]:
    """Summarises each whole block by the element-wise minimum and maximum of its keys.

    Args:
        keys: Shape [row, kv_head, token_position, dim]; tokens past the last whole block of the
            capacity do not count.
        block_tokens: Tokens per block.

    Returns:
        Minimum and maximum keys, in the dtype of `keys`.
    """
    num_rows, num_heads, num_tokens, head_dim = keys.shape
    num_blocks = num_tokens // block_tokens
    whole = jnp.asarray(keys)[:, :, : num_blocks * block_tokens]
    blocks = whole.reshape(num_rows, num_heads, num_blocks, block_tokens, head_dim)
    return jnp.min(blocks, axis=3), jnp.max(blocks, axis=3)


def page_bound_scores(
    queries: AnyArray, min_keys: AnyArray, max_keys: AnyArray
) -> Float32[Array, "row query_head draft_position block"]:
    """Bounds every q·k of a block from above by its element-wise key range.

    The bound is sum_d max(q_d · min_d, q_d · max_d). It costs one dot product per block instead
    of one per token.

    Args:
        queries: Shape [row, query_head, draft_position, dim].
        min_keys: Shape [row, kv_head, block, dim]; query_head is a multiple of kv_head.
        max_keys: As `min_keys`.

    Returns:
        Upper bounds of the unscaled logits, for `reduce_heads`.

    Raises:
        CompactionError: If the shapes do not fit together.
    """
    num_rows, num_query_heads, num_positions, head_dim = queries.shape
    num_kv_heads = min_keys.shape[1]
    fits = min_keys.shape == max_keys.shape and min_keys.shape[0] == num_rows
    if not fits or min_keys.shape[3] != head_dim or num_query_heads % num_kv_heads != 0:
        raise CompactionError(
            f"`queries` {queries.shape}, `min_keys` {min_keys.shape} and `max_keys` "
            f"{max_keys.shape} do not fit; expected [row, query_head, draft_position, dim] and "
            "twice [row, kv_head, block, dim], query heads a multiple of KV heads."
        )
    grouped = jnp.asarray(queries, jnp.float32).reshape(
        num_rows, num_kv_heads, num_query_heads // num_kv_heads, num_positions, head_dim
    )
    dot = "rhgpd,rhnd->rhgpn"
    high = jnp.einsum(dot, jnp.maximum(grouped, 0.0), jnp.asarray(max_keys, jnp.float32))
    low = jnp.einsum(dot, jnp.minimum(grouped, 0.0), jnp.asarray(min_keys, jnp.float32))
    return (high + low).reshape(num_rows, num_query_heads, num_positions, -1)


def _check_float32(name: str, array: AnyArray) -> None:
    if array.dtype != np.float32:
        raise CompactionError(
            f"`{name}` has dtype {array.dtype}; scores are float32. Cast them explicitly."
        )


def _reduce_first_axis(terms: Array, reduction: HeadReduction) -> Array:
    match reduction:
        case HeadReduction.MAX:
            return jnp.max(terms, axis=0)
        case HeadReduction.SUM:
            return _sum_first_axis(terms)
        case HeadReduction.MEAN:
            return _mean_first_axis(terms)


def _sum_first_axis(terms: Array) -> Array:
    """Sums by pairwise halving: element i joins element i + ceil(n / 2)."""
    while terms.shape[0] > 1:
        half = -(-terms.shape[0] // 2)
        paired = terms.shape[0] - half
        joined = terms[:paired] + terms[half:]
        terms = jnp.concatenate([joined, terms[paired:half]]) if paired < half else joined
    return terms[0]


def _log_sum_exp_first_axis(terms: Array) -> Array:
    maximum = jnp.max(terms, axis=0)
    offset = jnp.where(jnp.isfinite(maximum), maximum, 0.0)
    return offset + jnp.log(_sum_first_axis(jnp.exp(terms - offset)))


def _mean_first_axis(terms: Array) -> Array:
    reciprocal = np.float32(1.0) / np.float32(terms.shape[0])
    return _sum_first_axis(terms) * reciprocal
