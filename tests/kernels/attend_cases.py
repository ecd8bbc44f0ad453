"""Sequences laid out in pools for attention tests, and a naive model that imports none of ours."""

import contextlib
import dataclasses
import functools
import math

import ml_dtypes
import numpy as np

from blockcompact_jax.kernels import AttendSegment, Layout

from .pool_memory import plain_memory, register_packed, register_plain
from .reference import packed_places

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def naive_attend(queries, keys, values, *, scale, window=0):
    """Row by row in float64: (out, weight of each key, log-sum-exp)."""
    heads, num_queries, dims = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    out = np.zeros((heads, num_queries, dims))
    weights = np.zeros((heads, num_queries, num_keys))
    log_sum_exp = np.zeros((heads, num_queries))
    for head in range(heads):
        kv_head = head // (heads // num_kv_heads)
        for query in range(num_queries):
            own = num_keys - num_queries + query
            first = max(0, own + 1 - window) if window else 0
            scores = scale * (keys[kv_head, first : own + 1] @ queries[head, query].astype(float))
            total = math.fsum(np.exp(scores - scores.max()))
            log_sum_exp[head, query] = scores.max() + math.log(total)
            weights[head, query, first : own + 1] = np.exp(scores - scores.max()) / total
            out[head, query] = weights[head, query] @ values[kv_head]
    return out, weights, log_sum_exp


def naive_mass(weights, segment_keys, block_tokens, max_blocks):
    """Mass of each used entry, segment after segment."""
    mass = np.zeros((*weights.shape[:2], max_blocks))
    column = key = 0
    for num_keys in segment_keys:
        for first in range(0, num_keys, block_tokens):
            last = min(first + block_tokens, num_keys)
            if column < max_blocks:
                mass[..., column] = weights[..., key + first : key + last].sum(-1)
            column += 1
        key += num_keys
    return mass


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Queries, keys and values of one attention call, without any blocks."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @property
    def num_keys(self):
        return self.keys.shape[1]


def random_sequence(rng, dtype, *, kv_heads, group, num_queries, num_keys, dims):
    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    return Sequence(
        draw(kv_heads * group, num_queries, dims),
        draw(kv_heads, num_keys, dims),
        draw(kv_heads, num_keys, dims),
    )


def garbage(dtype, shape):
    """NaN everywhere: whatever reads it shows."""
    return np.full(shape, np.nan).astype(dtype)


@functools.cache
def _places(layout, tokens, dims, element_bytes):
    return [np.array(places) for places in packed_places(layout, tokens, dims, element_bytes)]


def _pack(blocks, layout):
    """[..., 2, H, B, D] -> [..., H, 2 * B, D]."""
    *lead, _, heads, tokens, dims = blocks.shape
    rows = np.zeros((*lead, heads, 2, tokens * dims), blocks.dtype)
    for kv, places in enumerate(_places(layout, tokens, dims, blocks.dtype.itemsize)):
        rows[..., kv, places] = blocks[..., kv, :, :, :]
    return rows.reshape(*lead, heads, 2 * tokens, dims)


def _blocks_of(rng, sequence, first, num_keys, block_tokens):
    """[1, num_blocks, 2, H, B, D] with NaN around the keys, and the table."""
    heads, _, dims = sequence.keys.shape
    num_entries = -(-num_keys // block_tokens)
    num_blocks = num_entries + 2
    table = rng.permutation(num_blocks)[:num_entries].astype(np.int32)
    blocks = garbage(sequence.keys.dtype, (1, num_blocks, 2, heads, block_tokens, dims))
    for token in range(num_keys):
        block, place = table[token // block_tokens], token % block_tokens
        blocks[0, block, 0, :, place] = sequence.keys[:, first + token]
        blocks[0, block, 1, :, place] = sequence.values[:, first + token]
    return blocks, table


@contextlib.contextmanager
def pools_of(rng, sequence, parts, register=register_plain):
    """Segments that hold the sequence; parts: (num_keys, block_tokens, place) one after another.

    `place` is a packed layout's label or a place of `plain_memory`, which `register` takes.
    """
    with contextlib.ExitStack() as stack:
        segments, first = [], 0
        for num_keys, block_tokens, place in parts:
            blocks, table = _blocks_of(rng, sequence, first, num_keys, block_tokens)
            unsigned = np.dtype(f"uint{8 * blocks.dtype.itemsize}")
            if place in ("amx", "vec"):
                layout = Layout.AMX if place == "amx" else Layout.VEC
                pool = register_packed(_pack(blocks.view(unsigned), place), layout)
            else:
                memory, view = plain_memory(blocks.view(unsigned), place)
                pool = register(memory, view)
            stack.enter_context(pool)
            # Entries past the last key are not looked at.
            table = np.append(table, np.int32(-1))
            segments.append(AttendSegment(pool, pool.current_ord(), 0, table, num_keys))
            first += num_keys
        assert first == sequence.num_keys
        yield segments
