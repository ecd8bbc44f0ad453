"""Decode with a transformers model on block-compacted KV, and compare with its own `generate`.

Uses a small random model, so it runs anywhere in seconds; put any loaded model and its tokens in
place of it.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blockcompact_jax.budget import Budget
from blockcompact_jax.kernels import Layout
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.sampling import Sampler
from torch_bridge.huggingface.session import CompactionSession, SessionLimits
from torch_bridge.huggingface.speculate import decode_speculative

NUM_NEW_TOKENS = 48

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    eos_token_id=None,
)
model = LlamaForCausalLM(config).eval()
context = torch.randint(0, 512, (1, 700))
full = model.generate(context, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0)

session = CompactionSession(
    model=model,
    limits=SessionLimits(
        max_tokens=context.shape[1] + NUM_NEW_TOKENS + 4,
        num_draft_tokens=4,
        num_lookup_tokens=2,
        reselect_every_rounds=4,
        block_tokens=32,
        budget=Budget(fraction=0.25),
    ),
    score_source=score_source("attention", seed=0),
    layout=Layout.AMX,
)
sampler = Sampler(temperature=0, seed=0)
first_token = sampler.choose(session.prefill(context[0].tolist()))
decoded = decode_speculative(
    session,
    context[0].tolist(),
    first_token=first_token,
    num_tokens=NUM_NEW_TOKENS,
    sampler=sampler,
    eos_token_ids=frozenset(),
    on_tokens=lambda tokens: None,
)
metrics = session.runtime.metrics
session.close()

is_identical = decoded.tokens == full[0, context.shape[1] :].tolist()
print(f"tokens identical to generate(): {is_identical}")
print(f"accepted {decoded.num_accepted} of {decoded.num_drafted} drafted tokens")
print(f"uploaded {metrics.h2d_bytes:,} bytes, released {metrics.physical_blocks_released} blocks")
if not is_identical:
    raise SystemExit("compacted decoding must not change the output")
