"""Ranking by (-score, ID) without sorting everything.

float32 scores map to unsigned keys in the same order. The key of the last chosen ID is found two
bits a pass over the keys, ties at that key are cut by ID, and only the chosen IDs are sorted.
"""

# pyright: reportUnknownMemberType=false

import functools
from typing import cast

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32, UInt32

from .ids import HOLE, AnyArray
from .masks import count_true, first_true, fold_rows, ids_from_mask, take_in_rows

LARGEST_KEY = np.uint32(0xFFFFFFFF)
"""Ranks before the key of every finite score."""

_SIGN_BIT = np.uint32(0x80000000)
_KEY_BITS = 32
_BITS_A_PASS = 2  # three counts, which share a pass over the keys
_COUNT_BITS = 10
_MAX_COMPARED_RANKS = 64


def score_keys(scores: AnyArray) -> UInt32[Array, "row id"]:
    """Maps finite float32 scores to keys in the same order; both zeros give the same key.

    The keys of finite scores lie strictly between 0 and `LARGEST_KEY`.
    """
    # The test for negative zero is on bits: a float comparison may flush denormals.
    bits = lax.bitcast_convert_type(jnp.asarray(scores), jnp.uint32)
    bits = jnp.where(bits == _SIGN_BIT, jnp.uint32(0), bits)
    return jnp.where(bits >= _SIGN_BIT, ~bits, bits | _SIGN_BIT)


def rank_keys(
    scores: Float32[AnyArray, "row block"], num_candidates: AnyArray, num_sinks: int
) -> UInt32[Array, "row block"]:
    """Maps scores to rank keys: larger is better, 0 is no candidate, sinks are largest.

    Args:
        scores: block scores, float32 [row, block].
        num_candidates: candidates of a row, its first blocks. Shape () or [row].
        num_sinks: first blocks, which rank before all others (static).
    """
    blocks = jnp.arange(scores.shape[1], dtype=jnp.int32)
    keys = jnp.where(blocks < num_sinks, LARGEST_KEY, score_keys(scores))
    is_candidate = blocks < jnp.asarray(num_candidates)[..., None]
    return jnp.where(is_candidate, keys, jnp.uint32(0))


def top_mask(
    keys: UInt32[Array, "row block"], count: Int32[Array, " row"]
) -> Bool[Array, "row block"]:
    """Marks the `count` largest keys of each row, the lowest IDs where keys tie.

    Keys of 0 are never marked as long as at least `count` keys are larger.
    """

    def is_settled(num_at_least: Array) -> Array:
        return jnp.all((num_at_least == count) | (count == 0))

    def has_more(state: tuple[Array, Array, Array]) -> Array:
        bit, _, num_at_least = state
        return (bit >= 0) & ~is_settled(num_at_least)

    def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, low, num_at_least = state
        step = jnp.uint32(1) << bit.astype(jnp.uint32)
        threshold = low
        probes = [low + step, low + 2 * step, low + 3 * step]
        for probe, num_probe in zip(probes, _count_at_least(keys, probes), strict=True):
            is_enough = num_probe >= count
            threshold = jnp.where(is_enough, probe, threshold)
            num_at_least = jnp.where(is_enough, num_probe, num_at_least)
        return bit - _BITS_A_PASS, threshold, num_at_least

    # Zeros that vary over the mesh axes of keys and count, as shard_map asks of a loop's start.
    zeros = jnp.sum(keys[:, :0], axis=1, dtype=jnp.int32) + (count & 0)
    start = (jnp.int32(_KEY_BITS - _BITS_A_PASS), zeros.astype(jnp.uint32), zeros + keys.shape[1])
    _, threshold, num_at_least = lax.while_loop(has_more, narrow, start)
    at_least = (keys >= threshold[:, None]) & (count > 0)[:, None]

    def cut_ties() -> Array:
        is_above = keys > threshold[:, None]
        num_tied = count - count_true(is_above)
        is_tied = keys == threshold[:, None]
        tie_rank = jnp.cumsum(is_tied, axis=1, dtype=jnp.int32)
        is_chosen = is_above | (is_tied & (tie_rank <= num_tied[:, None]))
        return is_chosen & (count > 0)[:, None]

    return cast(Array, lax.cond(is_settled(num_at_least), lambda: at_least, cut_ties))


def _count_at_least(
    keys: UInt32[Array, "row block"], probes: list[UInt32[Array, " row"]]
) -> list[Int32[Array, " row"]]:
    """Counts the keys of each row that reach each of at most three probes, in one pass.

    The counts share one integer while they are small. Folding twice leaves few of them to tell
    apart: what tells them apart reads the keys anew for each count if it comes right after.
    """

    def reached(part: Array) -> Array:
        ones = ((part >= probe[:, None]).astype(jnp.int32) for probe in probes)
        shifted = [one << (_COUNT_BITS * place) for place, one in enumerate(ones)]
        return functools.reduce(jnp.bitwise_or, shifted)

    def itself(part: Array) -> Array:
        return part

    folded = fold_rows(itself, jnp.add, fold_rows(reached, jnp.add, keys))
    counts = (folded >> (_COUNT_BITS * place) for place in range(len(probes)))
    mask = (1 << _COUNT_BITS) - 1
    return [jnp.sum(part & mask, axis=1, dtype=jnp.int32) for part in counts]


def rank_top(
    keys: UInt32[Array, "row block"], count: Int32[Array, " row"], capacity: int
) -> Int32[Array, "row capacity"]:
    """Returns the IDs of the `count` largest keys in (-key, ID) order, HOLE padded."""
    ids = ids_from_mask(top_mask(keys, count), capacity)
    if keys.shape[1] == 0 or capacity == 0:
        return ids
    found = take_in_rows(keys, jnp.maximum(ids, 0))
    chosen = jnp.where(ids >= 0, found, jnp.uint32(0))
    if capacity > _MAX_COMPARED_RANKS:
        _, ranked = lax.sort((~chosen, ids), dimension=1, num_keys=1, is_stable=True)
        return ranked
    # For short lists counting who is better is several times faster than a sort on CPU.
    places = jnp.arange(capacity, dtype=jnp.int32)
    mine, other = chosen[:, :, None], chosen[:, None, :]
    is_better = (other > mine) | ((other == mine) & (places[None, :] < places[:, None]))
    rank = jnp.sum(is_better, axis=2, dtype=jnp.int32)
    is_at = rank[:, None, :] == places[None, :, None]
    return jnp.sum(jnp.where(is_at, ids[:, None, :], 0), axis=2, dtype=jnp.int32)


def has_best(
    keys: UInt32[Array, "row block"], is_listed: Bool[Array, "row block"]
) -> Bool[Array, " row"]:
    """Returns whether the listed IDs of each row are the best by (-key, ID).

    IDs with a key of 0 compete with nobody; none of them may be listed.
    """
    ids = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, :]

    def keys_where(is_in: Array, keys: Array) -> Array:
        return jnp.where(is_in, keys, LARGEST_KEY)

    def ids_where(is_in: Array, ids: Array) -> Array:
        return jnp.where(is_in, ids, HOLE)

    listed_keys = fold_rows(keys_where, jnp.minimum, is_listed, keys)
    worst_key = jnp.min(listed_keys, axis=1, initial=LARGEST_KEY)[:, None]
    is_worst = is_listed & (keys == worst_key)
    worst_ids = fold_rows(ids_where, jnp.maximum, is_worst, ids)
    worst_id = jnp.max(worst_ids, axis=1, initial=HOLE)[:, None]
    is_better = (keys > worst_key) | ((keys == worst_key) & (ids < worst_id))
    return first_true(is_better & ~is_listed) == HOLE
