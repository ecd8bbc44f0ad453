"""Recording a tiny model: what is stored is what its attention computed with."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from blockcompact_jax.budget import OptionError
from torch_bridge import prompts
from torch_bridge.huggingface import record
from torch_bridge.huggingface.attend_cache import AttendCache
from torch_bridge.huggingface.layers import UnsupportedModelError
from torch_bridge.huggingface.record import RecordOptions, record_trace

TOKENS = [(7 * place + place // 11) % 97 for place in range(140)]
OPTIONS = {"context_tokens": 100, "forced_tokens": 31, "context_queries": 5, "query_every": 3}


@pytest.fixture
def loaded(model, monkeypatch):
    def build(tokenizer, *, context_tokens, **_):
        tokens = TOKENS[:context_tokens]
        return SimpleNamespace(token_ids=tokens, num_tokens=len(tokens), source="made up")

    monkeypatch.setattr(prompts, "build_prompt", build)
    return SimpleNamespace(model=model, tokenizer=None, name="tiny", max_positions=1024)


def full_layers(model):
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 9
    return [
        layer for layer in range(model.config.num_hidden_layers) if kinds[layer] == "full_attention"
    ]


def test_keys_are_those_of_a_stock_cache_and_attention_is_that_of_the_model(loaded):
    model = loaded.model
    trace = record_trace(RecordOptions(**OPTIONS), loaded)
    assert trace.layers.tolist() == full_layers(model)
    assert trace.token_ids.tolist() == TOKENS[:131]
    expected_positions = [*range(95, 100), *range(100, 131, 3)]
    assert trace.query_positions.tolist() == expected_positions
    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model(torch.tensor([TOKENS[:131]]), past_key_values=cache, output_attentions=True)
    model.set_attn_implementation("sdpa")
    for row, layer in enumerate(trace.layers):
        np.testing.assert_allclose(trace.keys[row], cache.layers[layer].keys[0], atol=1e-5)
        weights = out.attentions[layer][0].numpy()
        group = trace.queries.shape[1] // trace.keys.shape[1]
        for head in range(trace.queries.shape[1]):
            for query, position in enumerate(expected_positions):
                logits = trace.keys[row, head // group] @ trace.queries[row, head, query]
                seen = np.exp(trace.scales[row] * logits[: position + 1].astype(np.float64))
                expected = weights[head, position, : position + 1]
                np.testing.assert_allclose(seen / seen.sum(), expected, atol=1e-5)


def test_the_models_own_attention_is_back_afterwards(loaded, monkeypatch):
    record_trace(RecordOptions(**OPTIONS), loaded)
    assert loaded.model.config._attn_implementation == "sdpa"

    def fail(*_, **__):
        raise RuntimeError("no attention")

    monkeypatch.setattr(record, "sdpa_attention_forward", fail)
    with pytest.raises(RuntimeError, match="no attention"):
        record_trace(RecordOptions(**OPTIONS), loaded)
    assert loaded.model.config._attn_implementation == "sdpa"


def test_recording_leaves_a_borrowed_model_to_its_borrower(loaded):
    """Who borrows the model generates the same tokens, recorded in between or not."""
    tokens = torch.tensor([TOKENS[:70]])
    greedy = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    expected = loaded.model.generate(tokens, **greedy)
    alone = record_trace(RecordOptions(**OPTIONS), loaded)
    with AttendCache(loaded.model, budget="100%") as cache:
        found = record_trace(RecordOptions(**OPTIONS), loaded)
        assert loaded.model.config._attn_implementation == "blockcompact"
        assert torch.equal(loaded.model.generate(tokens, past_key_values=cache, **greedy), expected)
    assert loaded.model.config._attn_implementation == "sdpa"
    np.testing.assert_array_equal(found.keys, alone.keys)
    np.testing.assert_array_equal(found.queries, alone.queries)


def test_nothing_recorded_stays_in_memory(loaded, monkeypatch):
    """transformers' registry of attention functions is global and must not hold the recorder."""
    made = []

    class Watched(record._Recorder):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(record, "_Recorder", Watched)
    record_trace(RecordOptions(**OPTIONS), loaded)
    gc.collect()
    assert [reference() for reference in made] == [None]


def test_a_trace_may_be_smaller_than_the_model(loaded):
    layer = full_layers(loaded.model)[-1]
    whole = record_trace(RecordOptions(**OPTIONS), loaded)
    small = record_trace(RecordOptions(**OPTIONS, layers=(layer,), store_dtype="bfloat16"), loaded)
    assert small.layers.tolist() == [layer]
    assert (small.model_dtype, small.dtype) == ("float32", "bfloat16")
    for name in ("queries", "keys"):
        rounded = torch.from_numpy(getattr(whole, name)[-1]).bfloat16().float().numpy()
        np.testing.assert_array_equal(getattr(small, name)[0].astype(np.float32), rounded)
    assert small.weights == whole.weights


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context_tokens": 0}, "`context_tokens` is 0"),
        ({"query_every": 0}, "`query_every` is 0"),
        ({"context_queries": 101}, "`context_queries` is 101"),
        ({"layers": ()}, "`layers` is empty"),
        ({"layers": (99,)}, "names layer 99, which is no full-attention layer"),
        ({"store_dtype": "float16"}, "`store_dtype` is 'float16'"),
        ({"forced_tokens": 41}, "need a text of 141; it has 140"),
        ({"forced_tokens": 1000}, "exceed the 1,024 positions of tiny"),
    ],
)
def test_what_cannot_be_recorded_is_refused(loaded, changes, said):
    with pytest.raises(OptionError, match=said):
        record_trace(RecordOptions(**{**OPTIONS, **changes}), loaded)


def test_a_sliding_layer_is_no_layer_to_record(gemma, monkeypatch):
    monkeypatch.setattr(prompts, "build_prompt", None)
    loaded = SimpleNamespace(model=gemma, tokenizer=None, name="tiny", max_positions=1024)
    with pytest.raises(OptionError, match="names layer 0, which is no full-attention layer"):
        record_trace(RecordOptions(**OPTIONS, layers=(0, 1)), loaded)


def test_another_kind_of_attention_is_refused(loaded):
    loaded.model.set_attn_implementation("eager")
    try:
        with pytest.raises(UnsupportedModelError, match="expected 'sdpa'"):
            record_trace(RecordOptions(**OPTIONS), loaded)
    finally:
        loaded.model.set_attn_implementation("sdpa")
