"""Decode in vLLM with attention to a tenth of the context, several requests at once.

Uses a small random model, so it runs anywhere in under a minute; put any model's name in its place.
vLLM loads the plugin by itself: the package only has to be installed. The engine runs in a process
of its own; `VLLM_ENABLE_V1_MULTIPROCESSING=0` keeps it in this one.
"""

import importlib.util
import os
import sys
import tempfile

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


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory)
        llm = LLM(
            model=directory,
            dtype="bfloat16",
            max_model_len=1024,
            block_size=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            additional_config={"blockcompact": {"budget": "10%", "reselect_every_tokens": 16}},
        )
        prompts = [
            TokensPrompt(prompt_token_ids=[(7 * place + shift) % 512 for place in range(length)])
            for shift, length in enumerate((900, 600, 300))
        ]
        sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
        for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
            tokens = output.outputs[0].token_ids
            print(f"{len(prompt['prompt_token_ids'])} tokens of context: {list(tokens)[:8]} ...")


if __name__ == "__main__":
    main()
