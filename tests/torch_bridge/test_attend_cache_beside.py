"""Other uses of a model while an `AttendCache` is open: they are those of stock transformers."""

import pytest
import torch
from generating import LOGITS, generate, prompts
from transformers import DynamicCache, StaticCache

from torch_bridge.huggingface.attend_cache import AttendCache
from torch_bridge.huggingface.attention import borrow_attention, return_attention


def static_cache(model):
    """A prompt, then a token: the cache has more keys than tokens."""
    tokens, cache = prompts([40], 40)["input_ids"], StaticCache(model.config, max_cache_len=64)
    first = model(tokens, past_key_values=cache).logits
    return torch.cat([first, model(tokens[:, :1], past_key_values=cache).logits], 1)


def packed(model):
    """Two sequences in one row, told apart by their positions."""
    positions = torch.arange(20).repeat(2)[None]
    return model(prompts([40], 40)["input_ids"], position_ids=positions, use_cache=False).logits


def second_turn(model):
    """Several tokens of several rows after a filled cache."""
    tokens, cache = prompts([60, 60], 60)["input_ids"], DynamicCache(config=model.config)
    model(tokens[:, :40], past_key_values=cache)
    return model(tokens[:, 40:], past_key_values=cache).logits


def training(model):
    """Dropout is the model's own business."""
    dropped = model.config.attention_dropout
    layers = [layer.self_attn for layer in model.model.layers]
    try:
        for layer in layers:
            layer.attention_dropout = 0.5
        torch.manual_seed(8)
        return model.train()(prompts([40], 40)["input_ids"], use_cache=False).logits
    finally:
        model.eval()
        for layer in layers:
            layer.attention_dropout = dropped


@pytest.mark.parametrize("use", [static_cache, packed, second_turn, training])
def test_other_uses_of_the_model_are_stock_while_a_cache_is_open(family, use):
    with torch.inference_mode():
        expected = use(family)
        with AttendCache(family, budget="50%"):
            assert torch.equal(use(family), expected)


def test_stock_caches_are_stock_under_the_borrowed_name(family):
    inputs = prompts([190, 80])
    expected = generate(family, inputs, **LOGITS).logits
    borrow_attention(family)
    try:
        cache = DynamicCache(config=family.config)
        found = generate(family, inputs, cache, **LOGITS).logits
    finally:
        return_attention(family)
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_autocast_is_refused_where_a_cache_would_have_to_cast(family):
    """Its keys or values come in another dtype than the model's, and so would queries."""
    cast = torch.autocast("cpu", dtype=torch.bfloat16)
    refused = pytest.raises(ValueError, match="Nothing is cast")
    with AttendCache(family, budget="50%") as cache, cast, refused:
        generate(family, prompts([190]), cache)
