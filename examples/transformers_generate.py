"""`model.generate()` of stock transformers on block-compacted KV: lossless, and lossy but simpler.

Uses a small random model, so it runs anywhere in seconds; put any loaded model and its tokens in
place of it. The two prompts differ in length: the shorter one is padded on the left.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torch_bridge.huggingface.attend_cache import AttendCache
from torch_bridge.huggingface.lossless_generate import lossless_generate

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=2048,
    eos_token_id=None,
)
model = LlamaForCausalLM(config).eval()
inputs = {
    "input_ids": torch.randint(1, 512, (2, 700)),
    "attention_mask": torch.ones(2, 700, dtype=torch.long),
}
inputs["attention_mask"][1, :250] = 0
options = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 0}
full = model.generate(**inputs, **options)

# Lossless: drafted on 25 % of the blocks, verified on all of them.
lossless = model.generate(**inputs, **options, custom_generate=lossless_generate, budget="25%")
if not torch.equal(lossless, full):
    raise SystemExit("self-speculation must not change the output")
print("lossless_generate: the tokens of generate()")

# The attend policy: each decoded token attends to 25 % of the blocks. Lossy; 100 % is not.
for budget in ("100%", "25%"):
    with AttendCache(model, budget=budget) as cache:
        attended = model.generate(**inputs, **options, past_key_values=cache)
        for row, sequence in enumerate(cache.sequences):
            share = sequence.num_keys / sequence.num_full_keys
            num_equal = int((attended[row, 700:] == full[row, 700:]).sum())
            print(
                f"AttendCache {budget}, row {row}: read {share:.0%} of the keys, "
                f"{num_equal} of 48 tokens as in generate()"
            )
    if budget == "100%" and not torch.equal(attended, full):
        raise SystemExit("a budget of 100 % must not change the output")
