"""What the main job promises, on the real models."""

import pytest
import torch
from transformers import DynamicCache

from blockcompact_jax.budget import Budget
from blockcompact_jax.kernels import Layout
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.run import run_decoding
from torch_bridge.huggingface.session import CompactionSession, SessionLimits
from torch_bridge.models.load import load_model
from torch_bridge.prompts import build_prompt

pytestmark = [pytest.mark.models, pytest.mark.slow]
NAMES = ["smollm2-135m", "gemma3-270m"]
NEAR_TIE = 0.5
"""Logits of these models are around 20, where one step of bfloat16 is 0.125."""


@pytest.mark.parametrize("name", NAMES)
def test_float32_tokens_are_those_of_full_decoding(name):
    """Greedy, 2,048 tokens of context, a quarter of the blocks, 128 new tokens."""
    report = run_decoding(RunOptions(model=name, dtype="float32"))
    assert report.context_tokens == 2048
    assert report.new_tokens == 128
    assert report.tokens_identical_to_full is True
    assert report.first_divergence is None
    assert report.acceptance_rate is not None
    assert report.acceptance_rate > 0.3


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_tokens_are_the_full_models_choice_up_to_near_ties(name):
    report = run_decoding(RunOptions(model=name, dtype="bfloat16", num_new_tokens=48))
    if report.first_divergence is not None:
        assert report.first_divergence.logit_margin <= NEAR_TIE
    loaded = load_model(name, dtype=torch.bfloat16)
    context = build_prompt(loaded.tokenizer, context_tokens=2048).token_ids
    with torch.inference_mode():
        logits = loaded.model(
            torch.tensor([context + report.token_ids]), logits_to_keep=len(report.token_ids) + 1
        ).logits[0, :-1]
    chosen = logits.gather(1, torch.tensor(report.token_ids)[:, None])[:, 0]
    assert (logits.max(-1).values - chosen).max() <= NEAR_TIE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_budget_is_bitwise_the_full_model(name, dtype):
    """Teacher forcing past a block boundary: every logit equal to the stock model's."""
    loaded = load_model(name, dtype=dtype)
    tokens = build_prompt(loaded.tokenizer, context_tokens=640).token_ids
    context, forced = tokens[:600], tokens[600:]
    loaded.model.set_attn_implementation("sdpa")
    stock = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        loaded.model(torch.tensor([context]), past_key_values=stock, logits_to_keep=1)
        expected = [
            loaded.model(torch.tensor([[token]]), past_key_values=stock).logits[0, -1]
            for token in forced
        ]
    session = CompactionSession(
        model=loaded.model,
        limits=SessionLimits(
            max_tokens=700,
            num_draft_tokens=len(forced),
            num_lookup_tokens=0,
            reselect_every_rounds=1,
            block_tokens=32,
            budget=Budget(fraction=1.0),
        ),
        score_source=score_source("attention", seed=0),
        layout=Layout.AMX,
        attention="gathered",
    )
    session.prefill(context)
    for token, logits in zip(forced, expected, strict=True):
        assert torch.equal(session.draft_step([token])[-1], logits)
    session.close()
