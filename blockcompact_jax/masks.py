"""Set arithmetic on bounded IDs: lists to maps and masks to ascending lists.

An ID of a plan is bounded by a static capacity, so membership is one scatter and a lookup, and
ascending order is a prefix sum. The stages share these; nothing here knows a plan type.
"""

# pyright: reportUnknownMemberType=false

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int32

from .ids import HOLE, AnyArray

_Tree = TypeVar("_Tree")
_WORD_BITS = 32
_MAX_COMPARED_WORDS = 64
_FOLDED_SLICES = 16
_MIN_FOLDED_PLACES = 128


def choose(condition: AnyArray, if_true: _Tree, if_false: _Tree) -> _Tree:
    """Returns one of two trees of equal structure, leaf by leaf, by a scalar condition."""

    def choose_leaf(new: AnyArray, old: AnyArray) -> Array:
        return jnp.where(condition, new, old)

    return jax.tree.map(choose_leaf, if_true, if_false)


def place_mask(num_filled: AnyArray, capacity: int) -> Bool[Array, "row place"]:
    """Returns which places of a counted list are filled: place < num_filled, per row."""
    return jnp.arange(capacity, dtype=jnp.int32) < jnp.asarray(num_filled)[..., None]


def count_true(mask: AnyArray) -> Int32[Array, " row"]:
    """Returns how many places of each row of a mask hold. Shape [row, place]."""

    def as_count(part: Array) -> Array:
        return part.astype(jnp.int32)

    folded = fold_rows(as_count, jnp.add, jnp.asarray(mask))
    return jnp.sum(folded, axis=1, dtype=jnp.int32)


def first_true(mask: AnyArray) -> Int32[Array, " row"]:
    """Returns the first place of each row where a mask holds, HOLE where none does."""
    num_places = mask.shape[1]
    places = jnp.arange(num_places, dtype=jnp.int32)[None, :]

    def place_where(part: Array, places: Array) -> Array:
        return jnp.where(part, places, num_places)

    folded = fold_rows(place_where, jnp.minimum, jnp.asarray(mask), places)
    first = jnp.min(folded, axis=1, initial=num_places)
    return jnp.where(first == num_places, HOLE, first)


def fold_rows(
    value: Callable[..., Array], combine: Callable[[Array, Array], Array], *rows: Array
) -> Array:
    """Combines the values of slices of long rows element by element; the rest is to be reduced.

    XLA reduces the last axis one element after the other on CPU, but combines arrays on vectors:
    folding first is several times faster, and exact for integers. Slicing comes before `value`:
    what has many users is written to memory as a whole.

    Args:
        value: Gives the values of equal slices of all rows, element by element.
        combine: Of two values; their order does not matter.
        rows: Arrays [row, place] of equally many places.
    """
    num_places = rows[0].shape[1]
    if num_places < _MIN_FOLDED_PLACES:
        return value(*rows)
    size = num_places // _FOLDED_SLICES
    slices = [[row[:, size * i : size * (i + 1)] for row in rows] for i in range(_FOLDED_SLICES)]
    folded = functools.reduce(combine, (value(*parts) for parts in slices))
    rest = [row[:, size * _FOLDED_SLICES :] for row in rows]
    return folded if rest[0].shape[1] == 0 else jnp.concatenate([folded, value(*rest)], axis=1)


def place_by_id(ids: AnyArray, is_filled: AnyArray, max_ids: int) -> Int32[Array, "row max_ids"]:
    """Inverts lists of IDs.

    Args:
        ids: IDs of any one space. Shape [row, place]. Unfilled places may hold anything.
        is_filled: Which places count. Shape [row, place].
        max_ids: Static bound of the ID space; IDs outside [0, max_ids) are left out.

    Returns:
        The last place that holds each ID, HOLE where none does. Shape [row, max_ids].
    """
    num_rows, num_places = ids.shape
    is_valid = is_filled & (ids >= 0) & (ids < max_ids)
    target = jnp.where(is_valid, ids, max_ids)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    places = jnp.arange(num_places, dtype=jnp.int32)[None, :]
    empty = jnp.full((num_rows, max_ids), HOLE, jnp.int32)
    return empty.at[rows, target].max(places, mode="drop")


def take_in_rows(table: AnyArray, places: AnyArray) -> Array:
    """Returns table[row, place]; every place must be in range. Shape of `places`."""
    # One index a place: XLA on CPU writes pairs of row and place to memory before it gathers.
    num_rows, num_places = table.shape
    first_of_row = np.arange(num_rows, dtype=np.int32)[:, None] * num_places
    flat = jnp.asarray(table).reshape(num_rows * num_places)
    return flat.at[first_of_row + places].get(mode="promise_in_bounds")


def count_by_id(
    ids: AnyArray, is_filled: AnyArray | bool, rows: AnyArray, shape: tuple[int, int]
) -> Array:
    """Counts how often lists name each ID.

    Args:
        ids: IDs below shape[1]. Shape [list, place]. Unfilled places may hold anything.
        is_filled: Which places count. Shape [list, place].
        rows: Row of the result that each list counts in. Shape [list].
        shape: Static shape of the result, [row, id].

    Returns:
        int32 counts of the given shape.
    """
    num_rows, max_ids = shape
    is_valid = is_filled & (ids >= 0) & (ids < max_ids)
    # One index a place: XLA on CPU scatters nearly twice as fast into a flat array.
    target = jnp.where(is_valid, jnp.asarray(rows)[:, None] * max_ids + ids, num_rows * max_ids)
    counts = jnp.zeros(num_rows * max_ids, jnp.int32).at[target.reshape(-1)].add(1, mode="drop")
    return counts.reshape(shape)


def lookup(table: AnyArray, ids: AnyArray, is_filled: AnyArray) -> Int32[Array, "row place"]:
    """Returns table[row, id] at filled places with an ID in range, HOLE elsewhere."""
    max_ids = table.shape[1]
    if max_ids == 0:
        return jnp.full(ids.shape, HOLE, jnp.int32)
    found = take_in_rows(table, jnp.clip(ids, 0, max_ids - 1))
    return jnp.where(is_filled & (ids >= 0) & (ids < max_ids), found, HOLE)


def sort_ascending(
    ids: AnyArray, is_member: AnyArray, capacity: int
) -> Int32[Array, "row capacity"]:
    """Returns the member IDs of each row ascending, cut or padded with HOLE to `capacity`."""
    largest = jnp.iinfo(jnp.int32).max
    ordered = lax.sort(jnp.where(is_member, ids, largest), dimension=1)
    ordered = jnp.where(ordered == largest, HOLE, ordered)[:, :capacity]
    missing = capacity - ordered.shape[1]
    return jnp.pad(ordered, ((0, 0), (0, missing)), constant_values=HOLE)


def ids_from_mask(mask: AnyArray, capacity: int) -> Int32[Array, "row capacity"]:
    """Returns the IDs where a mask holds, ascending, cut or padded with HOLE to `capacity`.

    The mask is packed into 32-bit words; the word of each output place comes from prefix sums of
    the words' bit counts, the bit from halving the word. No sort, and no scatter of every ID.

    Args:
        mask: Shape [row, id].
        capacity: Static length of the result.
    """
    num_rows, max_ids = mask.shape
    if max_ids == 0 or capacity == 0:
        return jnp.full((num_rows, capacity), HOLE, jnp.int32)
    num_words = -(-max_ids // _WORD_BITS)
    bits = jnp.pad(jnp.asarray(mask), ((0, 0), (0, num_words * _WORD_BITS - max_ids)))
    bits = bits.reshape(num_rows, num_words, _WORD_BITS).astype(jnp.uint32)
    shifts = jnp.arange(_WORD_BITS, dtype=jnp.uint32)
    words = jnp.sum(bits << shifts, axis=-1, dtype=jnp.uint32)
    num_bits = lax.population_count(words).astype(jnp.int32)
    num_bits_through = jnp.cumsum(num_bits, axis=1, dtype=jnp.int32)
    places = jnp.arange(capacity, dtype=jnp.int32)
    word = _first_word_past(num_bits_through, places)
    is_filled = places < num_bits_through[:, -1:]
    word = jnp.minimum(word, num_words - 1)
    remaining = places - take_in_rows(num_bits_through - num_bits, word)
    found_word = take_in_rows(words, word)
    ids = word * _WORD_BITS + _select_bit(found_word, remaining)
    return jnp.where(is_filled, ids, HOLE)


def _first_word_past(
    num_bits_through: Int32[Array, "row word"], places: Int32[Array, " place"]
) -> Int32[Array, "row place"]:
    """Returns, per place 0 … n - 1, how many words end at or before it."""
    num_rows, num_words = num_bits_through.shape
    if num_words <= _MAX_COMPARED_WORDS:
        ends_before = num_bits_through[:, None, :] <= places[None, :, None]
        return jnp.sum(ends_before, axis=-1, dtype=jnp.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    num_ending = count_by_id(num_bits_through, True, rows, (num_rows, places.shape[0]))
    return jnp.cumsum(num_ending, axis=1, dtype=jnp.int32)


def _select_bit(words: Array, rank: Array) -> Array:
    """Returns the position of the rank-th set bit of each word."""
    position = jnp.zeros_like(rank)
    width = _WORD_BITS // 2
    while width > 0:
        low_mask = jnp.uint32((1 << width) - 1)
        num_low = lax.population_count(words & low_mask).astype(jnp.int32)
        is_high = rank >= num_low
        rank = jnp.where(is_high, rank - num_low, rank)
        words = jnp.where(is_high, words >> width, words)
        position = position + jnp.where(is_high, width, 0)
        width //= 2
    return position
