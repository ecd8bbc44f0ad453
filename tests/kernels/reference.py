"""Naive models of the kernels, written from the layouts' definitions. They import nothing of ours.

A plain block is [2, heads, tokens, dims] here; K is 0, V is 1.
"""

import numpy as np


def packed_places(layout, tokens, dims, element_bytes):
    """(K place, V place) of every (token, dim), as two lists of lists."""
    k_place = [[0] * dims for _ in range(tokens)]
    v_place = [[0] * dims for _ in range(tokens)]
    for t in range(tokens):
        for d in range(dims):
            if layout == "vec":
                k_place[t][d] = d * tokens + t
                v_place[t][d] = t * dims + d
            elif element_bytes == 2:
                k_place[t][d] = (t // 16) * 16 * dims + (d // 2) * 32 + (t % 16) * 2 + d % 2
                v_place[t][d] = (d // 16) * tokens * 16 + (t // 2) * 32 + (d % 16) * 2 + t % 2
            else:
                k_place[t][d] = (t // 16) * 16 * dims + d * 16 + t % 16
                v_place[t][d] = (d // 16) * tokens * 16 + t * 16 + d % 16
    return k_place, v_place


def pack_block(block, layout):
    """[2, heads, tokens, dims] -> [heads, 2 * tokens, dims]."""
    _, heads, tokens, dims = block.shape
    places = packed_places(layout, tokens, dims, block.dtype.itemsize)
    rows = np.zeros((heads, 2, tokens * dims), block.dtype)
    for kv in range(2):
        for t in range(tokens):
            for d in range(dims):
                rows[:, kv, places[kv][t][d]] = block[kv, :, t, d]
    return rows.reshape(heads, 2 * tokens, dims)


def upload(pool, source, rows):
    """Writes rows (layer, from, to, valid) of blocks; both are [layers, blocks, 2, H, B, D]."""
    result = pool.copy()
    for layer, from_block, to_block, valid in rows:
        if to_block != -1:
            result[layer, to_block, :, :, :valid] = source[layer, from_block, :, :, :valid]
    return result


def move(pool, rows):
    """Rows (layer, from, to), all read before any is written; pool is [layers, blocks, ...]."""
    result = pool.copy()
    for layer, from_block, to_block in rows:
        if to_block != -1:
            result[layer, to_block] = pool[layer, from_block]
    return result
