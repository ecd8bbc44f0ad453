"""Packed KV tensors as vLLM keeps them, written token by token by plain index arithmetic."""

import math

import torch


def packed_places(layout, block_tokens, dims, is_16_bit):
    """(K, V) places of [token, dim] in one head's row of `2 * block_tokens * dims` elements."""
    token = torch.arange(block_tokens)[:, None]
    dim = torch.arange(dims)[None]
    if layout == "vec":
        key, value = dim * block_tokens + token, token * dims + dim
    else:
        pair = 2 if is_16_bit else 1
        key = token // 16 * 16 * dims + dim // pair * 16 * pair + token % 16 * pair + dim % pair
        value = dim // 16 * block_tokens * 16 + token // pair * 16 * pair
        value = value + dim % 16 * pair + token % pair
    return key, block_tokens * dims + value


class PackedKV:
    """One layer's KV tensor [num_blocks, num_kv_heads, block_tokens, 2 * dims].

    `gap` elements lie between blocks, as where groups share an allocation.
    """

    def __init__(self, layout, *, num_blocks, heads, block_tokens, dims, dtype, gap=0):
        row = heads * block_tokens * 2 * dims
        memory = torch.full((num_blocks * (row + gap) + 64,), math.nan, dtype=dtype)
        offset = (-memory.data_ptr() % 64) // memory.element_size()
        strides = (row + gap, block_tokens * 2 * dims, 2 * dims, 1)
        self.tensor = memory[offset:].as_strided(
            (num_blocks, heads, block_tokens, 2 * dims), strides, offset
        )
        self.block_tokens = block_tokens
        self._rows = memory.as_strided(
            (num_blocks, heads, 2 * block_tokens * dims),
            (row + gap, block_tokens * 2 * dims, 1),
            offset,
        )
        self._key, self._value = packed_places(layout, block_tokens, dims, dtype.itemsize == 2)

    def clear(self, block):
        """Engines clear a block before its first use: what is unwritten must be finite."""
        self._rows[block] = 0

    def write(self, block, offset, key, value):
        """Writes one token's [heads, dims]."""
        self._rows[block][:, self._key[offset]] = key
        self._rows[block][:, self._value[offset]] = value

    def read(self, block_table, num_keys):
        """(keys, values) [heads, num_keys, dims] of a table, in float64."""
        out = []
        for places in (self._key, self._value):
            tokens = torch.cat([self._rows[int(block)][:, places] for block in block_table], dim=1)
            out.append(tokens[:, :num_keys].double())
        return out


def attend(query, keys, values, scale):
    """(out, weights) of one query [query_heads, dims] over [heads, keys, dims], in float64."""
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    weights = torch.softmax(scale * torch.einsum("hd,hkd->hk", query.double(), keys), dim=-1)
    return torch.einsum("hk,hkd->hd", weights, values), weights


def estimated_mass(query, keys, num_candidates, block_tokens, scale):
    """[candidate]: mean over heads of the attention mass of a query [query_heads, dims] over
    [heads, keys, dims], where the keys of all candidates but the first are taken as normally
    distributed, in float64."""
    group = query.shape[0] // keys.shape[0]
    query, keys = query.double(), keys.double().repeat_interleave(group, 0)
    scores = scale * torch.einsum("hd,hkd->hk", query, keys)
    weights = [scores[:, :block_tokens].logsumexp(1)]
    for block in range(1, num_candidates):
        of_block = keys[:, block * block_tokens : (block + 1) * block_tokens]
        mean = of_block.mean(1)
        variance = ((of_block - mean[:, None]) ** 2).mean(1)
        exponent = scale * (query * mean).sum(1) + scale**2 * (query**2 * variance).sum(1) / 2
        weights.append(exponent + math.log(block_tokens))
    weights.append(scores[:, num_candidates * block_tokens :].logsumexp(1))
    return torch.stack(weights, 1).softmax(1).mean(0)[:num_candidates]
