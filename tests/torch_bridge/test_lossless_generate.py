"""`generate(custom_generate=lossless_generate)`: stock tokens, stock distribution, or a refusal."""

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TypicalLogitsWarper

from blockcompact_jax.budget import OptionError
from torch_bridge.huggingface.attend_cache import AttendCache
from torch_bridge.huggingface.lossless_generate import lossless_generate
from torch_bridge.huggingface.sampling import ProcessedSampler
from torch_bridge.huggingface.session import CompactionSession

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 30}
LOSSLESS = {"custom_generate": lossless_generate, "budget": "3b", "num_draft_tokens": 3}


class Streamer:
    def __init__(self):
        self.tokens, self.is_ended = [], False

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.is_ended = True


def prompts(lengths):
    generator = torch.Generator().manual_seed(21)
    input_ids = torch.randint(3, 97, (len(lengths), 170), generator=generator)
    mask = torch.ones_like(input_ids)
    for row, length in enumerate(lengths):
        mask[row, : 170 - length] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


def test_greedy_tokens_are_the_stock_ones(model):
    inputs = prompts([170, 111])
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, **LOSSLESS), expected)
    assert model.config._attn_implementation == "sdpa"


def test_greedy_tokens_do_not_depend_on_what_chooses_when_to_select(llama):
    inputs = prompts([170])
    expected = llama.generate(**inputs, **GREEDY)
    chosen = {**LOSSLESS, "reselect_every_rounds": "auto"}
    assert torch.equal(llama.generate(**inputs, **GREEDY, **chosen), expected)


def test_greedy_tokens_are_the_best_of_the_processed_logits(model):
    """A typical-mass processor takes the best token away; draft and verifier both see that."""
    inputs, plain = prompts([170]), []
    for processors in ([], [TypicalLogitsWarper(0.3)]):
        options = {**GREEDY, "logits_processor": LogitsProcessorList(processors)}
        plain.append(model.generate(**inputs, **options))
        assert torch.equal(model.generate(**inputs, **options, **LOSSLESS), plain[-1])
    assert not torch.equal(plain[0], plain[1])


def test_a_subclass_of_a_known_processor_is_refused(llama):
    """It may look at the tokens before, which a processor of its base class does not."""

    class Sees(TopKLogitsWarper):
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, input_ids[0, -1:], -torch.inf)

    options = {**GREEDY, **LOSSLESS, "logits_processor": LogitsProcessorList([Sees(5)])}
    with pytest.raises(ValueError, match="has a Sees"):
        llama.generate(**prompts([170]), **options)


def test_rows_end_where_stock_rows_end(llama):
    """At the end of text, at a criterion, and padded with the padding token."""
    inputs = prompts([170, 111])
    free = llama.generate(**inputs, **GREEDY)
    options = {**GREEDY, "eos_token_id": int(free[0, 178])}
    expected = llama.generate(**inputs, **options)
    found = llama.generate(**inputs, **options, **LOSSLESS, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)

    def stop(input_ids, scores, **kwargs):
        return torch.tensor([row[-1] == free[0, 176] for row in input_ids])

    criteria = StoppingCriteriaList([stop])
    alone = {name: rows[:1] for name, rows in inputs.items()}
    expected = llama.generate(**alone, **GREEDY, stopping_criteria=criteria)
    streamer = Streamer()
    found = llama.generate(
        **alone, **GREEDY, **LOSSLESS, stopping_criteria=criteria, token_streamer=streamer
    )
    assert torch.equal(found, expected)
    assert found.shape[1] < 200
    assert streamer.tokens == found[0].tolist()
    assert streamer.is_ended


def test_sampling_follows_the_seed_and_draws_from_the_processed_logits(llama):
    options = {"do_sample": True, "top_k": 2, "temperature": 0.9, "pad_token_id": 0}
    options |= {"max_new_tokens": 25, "eos_token_id": None}
    inputs, drawn = prompts([170]), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(llama.generate(**inputs, **options, **LOSSLESS))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with torch.inference_mode():
        logits = llama(drawn[0]).logits[0, 169:-1]
    best = logits.topk(2).indices
    assert all(token in pair for token, pair in zip(drawn[0][0, 170:], best, strict=True))


def test_samples_are_distributed_as_the_full_model_says(monkeypatch):
    """Chi-square at 99.9 %, however bad the drafts: of the first token, and of the two after it."""
    right = CompactionSession.draft_step
    monkeypatch.setattr(
        CompactionSession, "draft_step", lambda self, tokens: right(self, tokens).roll(1, -1)
    )
    torch.manual_seed(9)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=4,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 4, (1, 170))
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 3}
    options |= {"pad_token_id": 0, "eos_token_id": None, "num_return_sequences": 200}
    torch.manual_seed(1)
    options["attention_mask"] = torch.ones_like(prompt)
    drawn = model.generate(prompt, **options, **LOSSLESS)[:, 170:]
    paths = torch.cartesian_prod(*3 * [torch.arange(4)])
    with torch.inference_mode():
        logits = model(torch.cat([prompt.expand(64, -1), paths], 1)).logits[:, 169:-1]
    chances = (logits.double() / 0.8).softmax(-1).gather(2, paths[..., None])[..., 0]
    expected = 200 * chances.prod(1).view(4, 16)
    counts = torch.bincount(drawn @ torch.tensor([16, 4, 1]), minlength=64).double().view(4, 16)
    assert expected.sum().item() == pytest.approx(200)
    for axis, limit in ((0, 37.70), (1, 16.27)):  # of 15 and of 3 degrees of freedom
        found, wanted = counts.sum(axis), expected.sum(axis)
        assert ((found - wanted) ** 2 / wanted).sum() < limit
        assert wanted.min() > 0.5


def test_a_sampler_gives_the_processors_probabilities_and_leaves_the_logits():
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)])
    found = torch.from_numpy(ProcessedSampler(processors, seed=1).probabilities(logits))
    assert torch.equal(logits, before)
    expected = torch.zeros(3, 97)
    for row in range(3):
        best = logits[row].topk(5).indices
        expected[row, best] = torch.softmax(logits[row, best] / 0.7, 0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"repetition_penalty": 1.2}, ValueError, "RepetitionPenaltyLogitsProcessor"),
        ({"num_beams": 2}, ValueError, "num_beams"),
        ({"prefill_chunk_size": 64}, ValueError, "prefill_chunk_size"),
        (
            {"output_scores": True, "return_dict_in_generate": True},
            ValueError,
            "output_scores",
        ),
        ({"budget": "0%"}, OptionError, "budget"),
        ({"num_draft_tokens": 0}, OptionError, "num_draft_tokens"),
        ({"num_lookup_tokens": -1}, OptionError, "num_lookup_tokens` is -1, expected 0 or more"),
        ({"layout": "hnd"}, OptionError, "expected one of amx, vec"),
        ({"reselect_every_rounds": "often"}, OptionError, "is 'often', expected .* or 'auto'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(llama, options, error, message):
    with pytest.raises(error, match=message):
        llama.generate(**prompts([170]), **{**GREEDY, **LOSSLESS, **options})
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"position_ids": 2 * torch.arange(170)[None]}, "those that `attention_mask` implies"),
        ({"position_ids": torch.arange(170)[None]}, "those that `attention_mask` implies"),
        ({"output_router_logits": True}, "`output_router_logits` is given"),
    ],
)
def test_keywords_of_the_forward_that_would_be_ignored_are_refused(llama, kwargs, message):
    """Plain positions are wrong, too, where a row is padded."""
    with pytest.raises(ValueError, match=message):
        llama.generate(**{**prompts([170, 111]), **GREEDY, **LOSSLESS, **kwargs})


def test_positions_that_the_mask_implies_are_taken(llama):
    inputs = prompts([170, 111])
    expected = llama.generate(**inputs, **GREEDY)
    positions = inputs["attention_mask"].cumsum(-1) - 1
    found = llama.generate(**inputs, **GREEDY, **LOSSLESS, position_ids=positions, use_cache=True)
    assert torch.equal(found, expected)


def test_a_filled_cache_and_a_streamer_of_two_rows_are_refused(llama):
    inputs = prompts([170, 170])
    cache = DynamicCache(config=llama.config)
    with torch.inference_mode():
        llama(inputs["input_ids"][:, :100], past_key_values=cache)
    with pytest.raises(ValueError, match="holds 100 tokens"):
        llama.generate(**inputs, **GREEDY, **LOSSLESS, past_key_values=cache)
    with pytest.raises(OptionError, match="batch of 2"):
        llama.generate(**inputs, **GREEDY, **LOSSLESS, token_streamer=Streamer())


def test_it_runs_while_an_attend_cache_is_open(llama):
    inputs = prompts([170])
    expected = llama.generate(**inputs, **GREEDY)
    with AttendCache(llama, budget="100%") as cache:
        assert torch.equal(llama.generate(**inputs, **GREEDY, **LOSSLESS), expected)
        assert torch.equal(llama.generate(**inputs, **GREEDY, past_key_values=cache), expected)
