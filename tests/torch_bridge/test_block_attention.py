"""Attention in place over the blocks of a cache, against attention written out in float64."""

import numpy as np
import pytest
import torch

from blockcompact_jax.kernels import Layout
from torch_bridge.attend import attend_blocks
from torch_bridge.full import FullKV
from torch_bridge.huggingface import block_attention
from torch_bridge.huggingface.attention import BLOCKS_KEYWORD, blockcompact_attention
from torch_bridge.huggingface.block_attention import BlockAttention
from torch_bridge.huggingface.cache import CompactedCache, Phase
from torch_bridge.pools import KVShape
from torch_bridge.resident import ResidentKV

BLOCK_TOKENS, HEADS, KV_HEADS, DIM = 8, 4, 1, 32
POSITIONS, MAX_BLOCKS = 4, 8


class _Module(torch.nn.Module):
    layer_idx = 3
    num_key_value_groups = HEADS // KV_HEADS
    is_causal = True


def _weights(query, key, scale):
    """Softmax of every query over the keys up to its own, one by one. [head, query, key]."""
    num_heads, num_queries, _ = query.shape
    num_keys = key.shape[1]
    result = np.zeros((num_heads, num_queries, num_keys))
    for head in range(num_heads):
        for place in range(num_queries):
            num_visible = num_keys - num_queries + place + 1
            logits = key[head // (HEADS // KV_HEADS), :num_visible] @ query[head, place] * scale
            weights = np.exp(logits - logits.max())
            result[head, place, :num_visible] = weights / weights.sum()
    return result


@pytest.fixture
def blocks(gemma):
    """Blocks of gemma's two full-attention layers, 1 and 3."""
    shape = KVShape(
        num_rows=2,
        num_kv_heads=KV_HEADS,
        block_tokens=BLOCK_TOKENS,
        head_dim=DIM,
        dtype=torch.float32,
    )
    full = FullKV(
        shape,
        max_blocks=MAX_BLOCKS,
        max_unpacked_tokens=BLOCK_TOKENS + POSITIONS,
        num_kept_blocks=1,
        layout=Layout.VEC,
    )
    resident = ResidentKV(shape, num_physical_blocks=6)
    cache = CompactedCache(gemma.config, full, resident)
    cache.is_gathering = False
    yield BlockAttention(
        cache, num_query_heads=HEADS, num_positions=POSITIONS, max_blocks=MAX_BLOCKS
    )
    full.close()
    resident.pool.close()


def _kv(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, KV_HEADS, num_tokens, DIM, generator=generator)


def _query(num_queries):
    return torch.randn(1, HEADS, num_queries, DIM, generator=torch.Generator().manual_seed(9))


def _forward(blocks, kv, num_new):
    """What a model does in one layer: updates the cache, then attends."""
    key, value = blocks._cache.layers[3].update(*kv[:, :, :, -num_new:])
    keyword = {BLOCKS_KEYWORD: blocks}
    query = _query(num_new)
    return blockcompact_attention(_Module(), query, key, value, None, scaling=0.3, **keyword)[0]


def _check(out, query, kv):
    key, value = kv[:, 0].double().numpy()
    weights = _weights(query[0].double().numpy(), key, 0.3)
    expected = np.einsum("hqk,hkd->qhd", weights, np.repeat(value, HEADS // KV_HEADS, axis=0))
    np.testing.assert_allclose(out[0].numpy(), expected, rtol=1e-4, atol=1e-5)
    return weights


@pytest.mark.parametrize(
    ("variable", "has_open_mp", "expected"),
    [(None, True, (None, True)), (None, False, (1, False)), ("3", True, (3, False))],
)
def test_attends_on_the_threads_of_torch_unless_the_variable_says_how_many(
    variable, has_open_mp, expected, monkeypatch, request
):
    """Threads are a matter of each call; the default of the process stays what it was."""
    monkeypatch.delenv("BLOCKCOMPACT_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("BLOCKCOMPACT_NUM_THREADS", variable)
    monkeypatch.setattr(block_attention, "num_threads", lambda: 3)
    monkeypatch.setattr(block_attention, "has_open_mp_threads", lambda: has_open_mp)
    asked = []

    def record(*arguments, num_threads, is_on_open_mp, **options):
        asked.append((num_threads, is_on_open_mp))
        attend_blocks(*arguments, num_threads=num_threads, is_on_open_mp=is_on_open_mp, **options)

    monkeypatch.setattr(block_attention, "attend_blocks", record)
    blocks = request.getfixturevalue("blocks")
    blocks.is_scored = True
    _forward(blocks, _kv(9, seed=1), 9)
    assert asked == [expected]


@pytest.mark.parametrize(("num_context", "num_new"), [(5, 1), (24, 4), (27, 3), (33, 2)])
@pytest.mark.parametrize("is_gathering", [False, True])
def test_verification_attends_to_every_token_and_records_block_mass(
    blocks, num_context, num_new, is_gathering
):
    """SEL-2: what is recorded of whole blocks is their softmax mass, of the newest queries."""
    blocks._cache.is_gathering = is_gathering
    kv = _kv(num_context + num_new, seed=1)
    blocks.mass.fill_(9.0)  # what an earlier, longer forward left
    blocks.is_scored = True
    for num_tokens, queries in ((num_context, num_context), (num_context + num_new, num_new)):
        seen = kv[:, :, :, :num_tokens]
        out = _forward(blocks, seen, queries)
        weights = _check(out, _query(queries), seen)
        blocks.repeat_oldest(queries)
        scored = weights[:, -POSITIONS:]
        scored = np.concatenate(
            [np.repeat(scored[:, :1], POSITIONS - scored.shape[1], 1), scored], 1
        )
        expected = np.zeros((HEADS, POSITIONS, MAX_BLOCKS))
        for block in range(-(-num_tokens // BLOCK_TOKENS)):
            tokens = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
            expected[:, :, block] = scored[:, :, tokens].sum(-1)
        np.testing.assert_allclose(blocks.mass[1].numpy(), expected, rtol=1e-4, atol=1e-6)
    assert blocks.num_layers_attended == 2


def test_drafts_attend_to_the_blocks_of_the_table_and_record_nothing(blocks):
    """RET-8: selected blocks in slot order, then the tail."""
    cache = blocks._cache
    kv = _kv(30, seed=2)
    _forward(blocks, kv[:, :, :, :28], 28)
    before = blocks.mass.clone()
    selected, tail = np.array([4, 0], np.int32), np.array([[2, 5], [2, 5]], np.int32)
    cache.resident.set_tables([selected] * 2, tail, 24)
    for place, logical in ((4, 2), (0, 1)):
        tokens = slice(place * BLOCK_TOKENS, (place + 1) * BLOCK_TOKENS)
        cache.resident.tensor[1, :, :, tokens] = kv[:, 0, :, logical * 8 : logical * 8 + 8]
    cache.resident.write_confirmed(24, kv[None, :, 0, :, 24:28].expand(2, -1, -1, -1, -1))
    cache.phase = Phase.DRAFT
    out = _forward(blocks, kv, 2)
    attended = [*range(16, 24), *range(8, 16), *range(24, 30)]
    _check(out, _query(2), kv[:, :, :, attended])
    assert torch.equal(blocks.mass, before)


def test_a_scored_forward_with_too_many_queries_is_refused(blocks):
    kv = _kv(20, seed=3)
    _forward(blocks, kv[:, :, :, :10], 10)
    blocks.is_scored = True
    with pytest.raises(ValueError, match="has 5 queries; expected at most `num_positions` = 4"):
        _forward(blocks, kv[:, :, :, :15], 5)
