"""Prompts for `generate()`, padded on the left, and how the tests call it."""

import torch

FAMILIES = ["llama", "gemma", "qwen", "mistral"]
GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 24}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}


def prompts(lengths, num_tokens=190):
    """(input_ids, attention_mask) of random prompts, padded on the left."""
    generator = torch.Generator().manual_seed(11)
    input_ids = torch.randint(1, 97, (len(lengths), num_tokens), generator=generator)
    mask = torch.ones_like(input_ids)
    for row, length in enumerate(lengths):
        mask[row, : num_tokens - length] = 0
        input_ids[row, : num_tokens - length] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


def generate(model, inputs, cache=None, **kwargs):
    return model.generate(**inputs, past_key_values=cache, **{**GREEDY, **kwargs})
