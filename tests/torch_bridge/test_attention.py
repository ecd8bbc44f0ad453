"""The registered attention and mask functions, against attention written out in float64."""

import numpy as np
import pytest
import torch

from torch_bridge.huggingface.attention import (
    BLOCKS_KEYWORD,
    attention_over_blocks,
    blockcompact_attention,
    blockcompact_mask,
    causal_tail_attention,
    causal_tail_mask,
)


class _Module(torch.nn.Module):
    layer_idx = 7
    num_key_value_groups = 3
    is_causal = True


def _probabilities(query, key, scale):
    """Softmax of every query over the keys up to its own, one by one. [head, query, key]."""
    num_heads, num_queries, _ = query.shape
    num_kv_heads, num_keys, _ = key.shape
    result = np.zeros((num_heads, num_queries, num_keys))
    for head in range(num_heads):
        for place in range(num_queries):
            num_visible = num_keys - num_queries + place + 1
            kv_head = head // (num_heads // num_kv_heads)
            logits = key[kv_head, :num_visible] @ query[head, place] * scale
            weights = np.exp(logits - logits.max())
            result[head, place, :num_visible] = weights / weights.sum()
    return result


def _random_qkv(num_queries, num_keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 6, num_queries, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, num_keys, 16, generator=generator)
    return query, key, value


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 50), (5, 50), (5, 5), (50, 50)])
def test_attention_is_causal_attention_whose_queries_are_the_last_keys(num_queries, num_keys):
    query, key, value = _random_qkv(num_queries, num_keys)
    out = causal_tail_attention(query, key, value, 0.3).transpose(1, 2)
    weights = _probabilities(query[0].double().numpy(), key[0].double().numpy(), 0.3)
    expected = np.einsum("hqk,hkd->qhd", weights, np.repeat(value[0].double().numpy(), 3, axis=0))
    np.testing.assert_allclose(out[0].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_query_never_sees_a_later_key():
    query, key, value = _random_qkv(5, 40)
    before = causal_tail_attention(query, key, value, 0.25).transpose(1, 2)
    for place in range(5):
        changed_key, changed_value = key.clone(), value.clone()
        changed_key[:, :, 36 + place :] = 100.0
        changed_value[:, :, 36 + place :] = -100.0
        after = causal_tail_attention(query, changed_key, changed_value, 0.25).transpose(1, 2)
        assert torch.equal(before[:, : place + 1], after[:, : place + 1])
        assert place == 4 or not torch.equal(before[:, place + 1], after[:, place + 1])


def test_mask_repeats_along_the_query_axis():
    mask = causal_tail_mask(2, 4, 3)
    assert mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]] * 3


def test_full_layers_get_no_mask_in_a_sessions_forward_and_sliding_ones_the_stock_one():
    with attention_over_blocks():
        assert blockcompact_mask(1, 4, 20, q_offset=16) is None
        mask = blockcompact_mask(1, 2, 3, q_offset=1, local_size=2, allow_is_causal_skip=False)
    assert mask.shape == (1, 1, 2, 3)
    assert blockcompact_mask(1, 4, 20, q_offset=16).shape == (1, 1, 4, 20)


def test_padded_batches_get_the_stock_mask():
    padding = torch.tensor([[True, True, True], [False, True, True]])
    mask = blockcompact_mask(2, 2, 3, q_offset=1, attention_mask=padding)
    assert mask[:, 0].int().tolist() == [[[1, 1, 0], [1, 1, 1]], [[0, 1, 0], [0, 1, 1]]]


@pytest.mark.parametrize(
    "arguments", [{"dropout": 0.1}, {"attention_mask": torch.ones(1, 1, 1, 4)}]
)
def test_dropout_and_foreign_masks_are_refused(arguments):
    """With a session's blocks, whose layers may hold fewer keys than a mask has columns."""
    query, key, value = _random_qkv(1, 4)
    mask = arguments.pop("attention_mask", None)
    blocks = {BLOCKS_KEYWORD: object()}
    with pytest.raises(ValueError, match="inference"):
        blockcompact_attention(_Module(), query, key, value, mask, **arguments, **blocks)
