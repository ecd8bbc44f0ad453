"""The small random Llama of the vLLM examples, which need no download with it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def save_model(directory: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=512,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
