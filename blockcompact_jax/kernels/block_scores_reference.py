"""What the block score calls compute, in pure JAX: on plain keys, without the compiled module."""

# pyright: reportUnknownMemberType=false

import jax
import jax.numpy as jnp

from blockcompact_jax.kernels.results import AnyArray
from blockcompact_jax.scores import BlockReduction


def reference_score_blocks(
    queries: AnyArray,
    keys: AnyArray,
    *,
    block_tokens: int,
    num_entries: int,
    block_reduction: BlockReduction | None,
    scale: float = 1.0,
) -> jax.Array:
    """Scores of the blocks of a sequence.

    Args:
        queries: `[num_query_heads, num_queries, head_dim]`.
        keys: `[num_kv_heads, num_keys, head_dim]`, in the order of the block table.
        block_tokens: Tokens of a block.
        num_entries: Entries of the table, at least as many as hold the keys.
        block_reduction: MAX, MEAN, SUM or LOG_SUM_EXP over a block's tokens, or None.
        scale: Factor of every q·k.

    Returns:
        float32 `[num_query_heads, num_queries, num_entries]`, with None `[..., num_entries *
        block_tokens]`; -inf where there is no key.
    """
    heads_per_kv = queries.shape[0] // keys.shape[0]
    wide = jnp.repeat(jnp.asarray(keys, jnp.float32), heads_per_kv, axis=0)
    scores = scale * jnp.einsum(
        "hqd,hkd->hqk",
        jnp.asarray(queries, jnp.float32),
        wide,
        precision=jax.lax.Precision.HIGHEST,
    )
    spare = num_entries * block_tokens - keys.shape[1]
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, spare)), constant_values=-jnp.inf)
    if block_reduction is None:
        return padded
    blocks = padded.reshape(*scores.shape[:2], num_entries, block_tokens)
    if block_reduction is BlockReduction.MAX:
        return jnp.max(blocks, axis=-1)
    if block_reduction is BlockReduction.LOG_SUM_EXP:
        return jax.nn.logsumexp(blocks, axis=-1)
    token = jnp.arange(num_entries * block_tokens, dtype=jnp.int32)
    is_key = (token < keys.shape[1]).reshape(num_entries, block_tokens)
    count = jnp.sum(is_key, axis=-1)
    total = jnp.sum(jnp.where(is_key, blocks, 0.0), axis=-1)
    if block_reduction is BlockReduction.MEAN:
        total /= jnp.maximum(count, 1).astype(jnp.float32)
    return jnp.where(count > 0, total, -jnp.inf)


def reference_summarize_blocks(
    keys: AnyArray, *, block_tokens: int, num_entries: int
) -> tuple[jax.Array, jax.Array]:
    """Element-wise minimum and maximum of the keys of each block.

    Args:
        keys: `[num_kv_heads, num_keys, head_dim]`, in the order of the block table.
        block_tokens: Tokens of a block.
        num_entries: Entries of the table, at least as many as hold the keys.

    Returns:
        Bounds `[num_kv_heads, num_entries, head_dim]`; 0 where an entry has no keys.
    """
    heads, num_keys, dims = keys.shape
    spare = ((0, 0), (0, num_entries * block_tokens - num_keys), (0, 0))
    shape = (heads, num_entries, block_tokens, dims)
    array = jnp.asarray(keys)
    minimum = jnp.min(jnp.pad(array, spare, constant_values=jnp.inf).reshape(shape), axis=2)
    maximum = jnp.max(jnp.pad(array, spare, constant_values=-jnp.inf).reshape(shape), axis=2)
    is_used = (jnp.arange(num_entries, dtype=jnp.int32) * block_tokens < num_keys)[None, :, None]
    zero = jnp.zeros((), array.dtype)
    return jnp.where(is_used, minimum, zero), jnp.where(is_used, maximum, zero)
