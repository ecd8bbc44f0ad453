"""`generate()` with an `AttendCache`, against stock caches and against the policy written out."""

import copy

import pytest
import torch
from attend_twin import AttendTwin, EstimateTwin
from generating import FAMILIES, LOGITS, generate, prompts
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    StoppingCriteriaList,
)

from blockcompact_jax.budget import OptionError
from torch_bridge.huggingface.attend_cache import AttendCache
from torch_bridge.huggingface.layers import UnsupportedModelError


@pytest.mark.parametrize("attention", ["blocks", "gathered"])
@pytest.mark.parametrize("lengths", [[190], [190, 190], [190, 61, 33]], ids=str)
def test_a_full_budget_generates_the_stock_tokens(family, lengths, attention):
    inputs = prompts(lengths)
    expected = generate(family, inputs)
    with AttendCache(family, budget="100%", attention=attention) as cache:
        assert torch.equal(generate(family, inputs, cache), expected)
        assert all(s.num_keys == s.num_full_keys > 0 for s in cache.sequences)
    assert family.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_full_budget_is_bitwise_stock_where_gathered(model, num_rows, dtype):
    typed = model.to(dtype)
    try:
        inputs = prompts([190] * num_rows)
        expected = generate(typed, inputs, **LOGITS).logits
        with AttendCache(typed, budget="100%", attention="gathered") as cache:
            found = generate(typed, inputs, cache, **LOGITS).logits
        assert torch.equal(torch.stack(found), torch.stack(expected))
    finally:
        model.to(torch.float32)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [(name, [190]) for name in FAMILIES] + [("llama", [190, 100, 33]), ("qwen", [64, 190])],
)
@pytest.mark.parametrize(("layout", "block_tokens"), [("amx", 32), ("vec", 8)])
def test_every_logit_is_that_of_the_policy_written_out(
    request, name, lengths, layout, block_tokens
):
    """SEL-2, SEL-3, RET-8: tail, sink and sliding windows stay; padding is nobody's token."""
    model, inputs = request.getfixturevalue(name), prompts(lengths)
    twin = AttendTwin(
        fraction=0.4,
        every_tokens=7,
        block_tokens=block_tokens,
        padding=[190 - length for length in lengths],
    )
    twin.register("attend_twin")
    model.set_attn_implementation("attend_twin")
    try:
        expected = generate(model, inputs, **LOGITS)
    finally:
        model.set_attn_implementation("sdpa")
    options = {"layout": layout, "block_tokens": block_tokens, "reselect_every_tokens": 7}
    with AttendCache(model, budget="40%", **options) as cache:
        found = generate(model, inputs, cache, **LOGITS)
        assert all(s.num_keys < s.num_full_keys for s in cache.sequences if s.num_tokens > 150)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4
    )
    lossy = torch.stack(generate(model, inputs, **LOGITS).logits)
    assert not torch.allclose(torch.stack(found.logits), lossy, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [(name, [190]) for name in FAMILIES] + [("llama", [190, 100, 33]), ("qwen", [64, 190])],
)
@pytest.mark.parametrize(
    ("part_tokens", "options"),
    [
        (8, {"block_tokens": 32}),
        (8, {"block_tokens": 16, "layout": "vec", "attention": "gathered"}),
        (12, {"block_tokens": 12, "layout": "vec"}),
    ],
    ids=["32", "16", "12"],
)
def test_every_token_selects_by_the_estimate_written_out(
    request, name, lengths, part_tokens, options
):
    """SEL-2, SEL-3, RET-8: as above where `select_by` is "estimate"."""
    model, inputs = request.getfixturevalue(name), prompts(lengths)
    twin = EstimateTwin(
        fraction=0.4,
        block_tokens=options["block_tokens"],
        part_tokens=part_tokens,
        padding=[190 - length for length in lengths],
    )
    twin.register("attend_twin")
    model.set_attn_implementation("attend_twin")
    try:
        expected = generate(model, inputs, **LOGITS)
    finally:
        model.set_attn_implementation("sdpa")
    with AttendCache(model, budget="40%", select_by="estimate", **options) as cache:
        found = generate(model, inputs, cache, **LOGITS)
        assert all(s.num_keys < s.num_full_keys for s in cache.sequences if s.num_tokens > 150)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4
    )


def test_estimates_read_what_the_budget_says_and_nothing_is_scored(llama):
    """39 decoding forwards over 192 to 230 tokens, three blocks and the partial one each."""
    with AttendCache(llama, budget="3b", select_by="estimate") as cache:
        generate(llama, prompts([191], 191), cache, max_new_tokens=40)
        (sequence,) = cache.sequences
    expected = sum(3 * 32 + num_tokens % 32 for num_tokens in range(192, 231))
    assert (sequence.num_keys, sequence.num_full_keys) == (expected, sum(range(192, 231)))
    assert sequence.num_scored == 0


def test_estimates_with_a_full_budget_and_in_chunks_give_the_stock_tokens(llama):
    inputs = prompts([190])
    with AttendCache(llama, budget="100%", select_by="estimate") as cache:
        chunked = generate(llama, inputs, cache, prefill_chunk_size=48)
        assert torch.equal(chunked, generate(llama, inputs))
    options = {"budget": "30%", "select_by": "estimate", "block_tokens": 16, "layout": "vec"}
    with AttendCache(llama, **options) as cache:
        chunked = generate(llama, inputs, cache, prefill_chunk_size=43)
    with AttendCache(llama, **options) as cache:
        assert torch.equal(chunked, generate(llama, inputs, cache))


def test_a_padded_row_is_generated_as_if_alone(family):
    with AttendCache(family, budget="30%", block_tokens=8, layout="vec") as cache:
        batch = generate(family, prompts([190, 90]), cache, **LOGITS)
        num_keys = cache.sequences[1].num_keys
    alone = {name: rows[1:, 100:] for name, rows in prompts([190, 90]).items()}
    with AttendCache(family, budget="30%", block_tokens=8, layout="vec") as cache:
        single = generate(family, alone, cache, **LOGITS)
        assert cache.sequences[0].num_keys == num_keys
    torch.testing.assert_close(
        torch.stack(batch.logits)[:, 1], torch.stack(single.logits)[:, 0], rtol=1e-3, atol=1e-3
    )


def test_a_dialogue_goes_on_in_the_same_cache(family):
    """Later prompts of many tokens are computed with full attention, whole or in chunks."""
    first = prompts([150, 90], 150)
    expected = generate(family, first)
    with AttendCache(family, budget="100%") as cache:
        answer = generate(family, first, cache)
        assert torch.equal(answer, expected)
        more = torch.randint(1, 97, (2, 45), generator=torch.Generator().manual_seed(12))
        tokens = torch.cat([answer, more], 1)
        mask = torch.cat([first["attention_mask"], torch.ones(2, 69, dtype=torch.long)], 1)
        second = {"input_ids": tokens, "attention_mask": mask}
        assert torch.equal(generate(family, second, cache), generate(family, second))


def test_a_prompt_in_chunks_scores_and_selects(llama):
    inputs = prompts([190])
    with AttendCache(llama, budget="100%") as cache:
        chunked = generate(llama, inputs, cache, prefill_chunk_size=48)
        assert torch.equal(chunked, generate(llama, inputs))
    with AttendCache(llama, budget="2b") as cache:
        generate(llama, inputs, cache, prefill_chunk_size=48)
        assert cache.sequences[0].num_keys < cache.sequences[0].num_full_keys


def test_the_number_of_keys_is_what_the_budget_says(llama):
    """39 decoding forwards over 192 to 230 tokens: every 16th is scored, the others skip."""
    with AttendCache(llama, budget="3b", reselect_every_tokens=16) as cache:
        generate(llama, prompts([191], 191), cache, max_new_tokens=40)
        (sequence,) = cache.sequences
    candidates, expected, selected_at = 4, 0, 191
    for num_tokens in range(192, 231):
        if num_tokens - selected_at >= 16:
            expected, selected_at, candidates = (
                expected + num_tokens,
                num_tokens,
                num_tokens // 32 - 1,
            )
        else:
            expected += num_tokens - (candidates - 2) * 32
    assert (sequence.num_keys, sequence.num_full_keys) == (expected, sum(range(192, 231)))
    assert sequence.num_scored == 3


def test_sampling_criteria_and_streamers_are_those_of_generate(llama):
    inputs, heard = prompts([190]), []

    class Streamer:
        def put(self, tokens):
            heard.append(tokens)

        def end(self):
            heard.append(None)

    def stop(input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 200])

    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    options["stopping_criteria"] = StoppingCriteriaList([stop])
    torch.manual_seed(3)
    expected = generate(llama, inputs, **options)
    torch.manual_seed(3)
    with AttendCache(llama, budget="100%", attention="gathered") as cache:
        found = generate(llama, inputs, cache, streamer=Streamer(), **options)
    assert torch.equal(found, expected)
    assert found.shape[1] == 200
    assert torch.equal(torch.cat([tokens.flatten() for tokens in heard[:-1]]), found[0])


def test_several_samples_of_a_prompt_are_rows_of_the_cache(llama):
    inputs, options = prompts([190]), {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(4)
    expected = generate(llama, inputs, **options)
    torch.manual_seed(4)
    with AttendCache(llama, budget="100%", attention="gathered") as cache:
        assert torch.equal(generate(llama, inputs, cache, **options), expected)
        assert len(cache.sequences) == 3


def test_caches_of_several_kinds_share_a_model(llama):
    """While one is open, stock caches, other caches and padding work as ever."""
    inputs = prompts([190, 70])
    expected = generate(llama, inputs)
    with AttendCache(llama, budget="100%") as first:
        with AttendCache(llama, budget="2b") as second:
            generate(llama, inputs, second)
            assert torch.equal(generate(llama, inputs), expected)
        assert torch.equal(generate(llama, inputs, first), expected)
        first.reset()
        assert first.get_seq_length() == 0
        alone = {name: rows[:1] for name, rows in inputs.items()}
        assert torch.equal(generate(llama, alone, first), generate(llama, alone))
    assert llama.config._attn_implementation == "sdpa"


def test_a_lost_cache_gives_the_attention_back(llama):
    cache = AttendCache(llama, budget="100%")
    assert llama.config._attn_implementation == "blockcompact"
    del cache
    import gc

    gc.collect()
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"prompt_lookup_num_tokens": 3}, "not supported with an AttendCache"),
    ],
)
def test_beams_and_assistants_are_refused(llama, options, message):
    with (
        AttendCache(llama, budget="50%") as cache,
        pytest.raises((NotImplementedError, ValueError), match=message),
    ):
        generate(llama, prompts([190]), cache, **options)


def test_right_padding_is_refused(llama):
    inputs = prompts([190, 190])
    inputs["attention_mask"][1, -5:] = 0
    with (
        AttendCache(llama, budget="50%") as cache,
        pytest.raises(ValueError, match="padding_side='left'"),
    ):
        generate(llama, inputs, cache)


def test_a_first_chunk_of_padding_alone_is_refused(llama):
    inputs = prompts([190, 90])
    expected = generate(llama, inputs)
    with AttendCache(llama, budget="100%") as cache:
        with pytest.raises(ValueError, match="row 1 hides all of its first 64 tokens"):
            generate(llama, inputs, cache, prefill_chunk_size=64)
        cache.reset()
        assert torch.equal(generate(llama, inputs, cache, prefill_chunk_size=128), expected)


def test_another_batch_and_another_padding_are_refused(llama):
    inputs = prompts([190, 90])
    token = torch.ones(2, 1, dtype=torch.long)
    with AttendCache(llama, budget="50%") as cache, torch.inference_mode():
        llama(**inputs, past_key_values=cache)
        with pytest.raises(ValueError, match="expected the 2 of this cache"):
            llama(token[:1], past_key_values=cache)
    with AttendCache(llama, budget="50%") as cache, torch.inference_mode():
        llama(**inputs, past_key_values=cache)
        with pytest.raises(ValueError, match="Pass the mask of the whole sequence"):
            llama(token, past_key_values=cache)
        with pytest.raises(ValueError, match="make a new cache"):
            llama(token, past_key_values=cache)


def test_what_does_not_fit_or_is_closed_is_refused(llama):
    inputs = prompts([190])
    with (
        AttendCache(llama, budget="50%", max_tokens=200) as cache,
        pytest.raises(ValueError, match="`max_tokens` is 200"),
    ):
        generate(llama, inputs, cache)
    with pytest.raises(ValueError, match="closed"):
        generate(llama, inputs, cache)
    with AttendCache(llama, budget="50%") as cache:
        with pytest.raises(NotImplementedError, match="copying"):
            copy.deepcopy(cache)
        llama.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="implementation is 'sdpa'"):
            generate(llama, inputs, cache)


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "1b"},
        {"budget": "0%"},
        {"budget": "50%", "reselect_every_tokens": 0},
        {"budget": "50%", "block_tokens": 0},
        {"budget": "50%", "max_tokens": 0},
        {"budget": "50%", "max_tokens": -64},
        {"budget": "50%", "layout": "hnd"},
        {"budget": "50%", "attention": "eager"},
        {"budget": "50%", "select_by": "recency"},
        {"budget": "50%", "select_by": "estimate", "reselect_every_tokens": 4},
        {"budget": "50%", "select_by": "estimate", "decision_log": "decisions.jsonl"},
    ],
)
def test_options_that_cannot_be_used_are_refused(llama, options):
    with pytest.raises(OptionError, match=f"`{list(options)[-1]}`"):
        AttendCache(llama, **options)
    assert llama.config._attn_implementation == "sdpa"


def test_float16_is_refused(llama):
    typed = llama.to(torch.float16)
    try:
        with pytest.raises(UnsupportedModelError, match="float16; expected one of"):
            AttendCache(typed, budget="50%")
    finally:
        llama.to(torch.float32)


def test_gradients_are_refused(llama):
    with (
        AttendCache(llama, budget="50%") as cache,
        pytest.raises(ValueError, match="inference_mode"),
    ):
        llama(torch.ones(1, 5, dtype=torch.long), past_key_values=cache)


def test_models_with_attention_sinks_are_refused():
    config = GptOssConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=97,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = GptOssForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="expected 'sdpa'"):
        AttendCache(model, budget="50%")


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_model_that_changes_keys_on_their_way_is_refused(llama, num_layers):
    """Its attention would see the newest tokens only."""
    config = copy.deepcopy(llama.config)
    config.num_hidden_layers = num_layers
    model = type(llama)(config).eval()
    with AttendCache(model, budget="50%") as cache:
        update = cache.update

        def copying_update(*args, **kwargs):
            key, value = update(*args, **kwargs)
            return key.clone(), value

        cache.update = copying_update
        with pytest.raises(UnsupportedModelError, match="as they are"):
            generate(model, prompts([190]), cache)
