"""Decode in vLLM faster with stock vLLM's output: drafts over a tenth of the context, verified.

Uses a small random model, so it runs anywhere in about a minute; put any model's name in its place.
The model drafts by itself, over the blocks that matter; vLLM verifies the drafts with everything.
The tokens are compared with those of an engine without drafts.
"""

import importlib.util
import os
import sys
import tempfile
from typing import Any

if importlib.util.find_spec("vllm") is None:
    print("skipped: vllm is not installed; pip install 'blockcompact-jax[vllm]'")
    sys.exit()

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# Imported here and not in a function, whose end would then not end its engine: docs/engines.md,
# "A process that does not end".
from random_llama import save_model
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

LOSSLESS = {
    "additional_config": {
        "blockcompact": {"policy": "lossless", "budget": "10%", "reselect_every_tokens": 48}
    },
    "speculative_config": {
        "method": "custom_class",
        "model": "torch_bridge.vllm.proposer.SelfSpeculation",
        "num_speculative_tokens": 8,
    },
}


def generate(model: str, **options: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens of each request, and vLLM's own count of drafted and accepted tokens."""
    llm = LLM(
        model=model,
        dtype="float32",  # in bfloat16 near-ties may fall the other way where tokens are verified
        max_model_len=1024,
        block_size=32,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options,
    )
    prompts = [
        TokensPrompt(
            prompt_token_ids=[(7 * place * place + shift) % 512 for place in range(length)]
        )
        for shift, length in enumerate((900, 600, 300))
    ]
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    tokens = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling)]
    names = {"drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    counters = {
        metric.name: int(getattr(metric, "value", 0))
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode")
    }
    return tokens, {
        word: counters.get(f"vllm:spec_decode_{name}", 0) for word, name in names.items()
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory)
        tokens, counts = generate(directory, **LOSSLESS)
        print(f"{counts['drafted']} tokens drafted, {counts['accepted']} of them accepted")
        without_drafts, _ = generate(directory)
    if tokens != without_drafts:
        sys.exit("drafts changed the tokens")
    print(f"the same tokens as without drafts: {tokens[0][:8]} ...")


if __name__ == "__main__":
    main()
