"""The attention function and mask function registered with transformers.

Full-attention layers attend over the blocks of their cache: the whole KV when verifying, the
resident blocks when drafting. In both the last `num_queries` keys are the queries' own, so one rule
gives the causal mask for any block table. A `BlockAttention` reads the blocks in place; without it
(or with a gathering cache) the keys and values that the cache layer handed out are attended to.
Sliding-window layers go to the stock function.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from torch_bridge.huggingface.block_attention import BlockAttention
from torch_bridge.huggingface.layers import UnsupportedModelError

_CHANGES_ATTENTION = ("s_aux", "softcap", "position_bias", "sinks", "head_mask")
"""Keywords with which some models ask for another attention than softmax over scaled products."""

ATTENTION_NAME = "blockcompact"
"""The `attn_implementation` under which the functions of this module are registered."""

BLOCKS_KEYWORD = "blockcompact_blocks"
"""Keyword of the model's forward that carries a `BlockAttention` to every attention layer."""


def blockcompact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends over the keys and values that the cache layer returned.

    Args:
        module: the attention module; its `layer_idx` is the decoder layer ID.
        query: [1, num_query_heads, num_queries, head_dim], rotated.
        key: [1, num_kv_heads, num_keys, head_dim] as the cache layer returned it; the last
            num_queries are the queries' own.
        value: as `key`.
        attention_mask: the stock mask for sliding-window layers, None for full-attention layers.
        scaling: softmax scale; None means head_dim ** -0.5.
        dropout: must be 0 (inference only).
        **kwargs: `sliding_window` marks a sliding-window layer; `BLOCKS_KEYWORD` is where blocks
            are read in place and scored.

    Returns:
        ([1, num_queries, num_query_heads, head_dim], None).

    Raises:
        ValueError: if dropout is asked for or a full-attention layer receives a mask.
        UnsupportedModelError: if the model asks for another kind of attention.
    """
    blocks: BlockAttention | None = kwargs.pop(BLOCKS_KEYWORD, None)
    if kwargs.get("sliding_window") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    foreign = [name for name in _CHANGES_ATTENTION if kwargs.get(name) is not None]
    if foreign:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes `{foreign[0]}` to attention, which the "
            f"`{ATTENTION_NAME}` attention does not compute; this architecture is not supported."
        )
    if dropout or attention_mask is not None:
        raise ValueError(
            f"`{ATTENTION_NAME}` attention got dropout={dropout} and "
            f"{'a' if attention_mask is not None else 'no'} mask for a full-attention layer; "
            "expected inference on one unpadded sequence. Call `model.eval()` and pass no mask."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    if blocks is not None and blocks.has_more_than_handed_out(layer):
        return blocks.attend(layer, query, scale), None
    if blocks is not None:
        blocks.score(layer, query, scale)
    return _attend(query, key, value, scale).transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention whose queries are the last keys; the stock call where there is one."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    has_groups = query.shape[1] != key.shape[1]
    if num_queries in (1, num_keys):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=num_queries > 1, scale=scale, enable_gqa=has_groups
        )
    # Stock attention would repeat every key once per query head here. Folding the query heads that
    # share a KV head into the query axis reads each key once.
    _, num_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    heads_per_kv = num_heads // num_kv_heads
    folded = query.reshape(1, num_kv_heads, heads_per_kv * num_queries, head_dim)
    mask = causal_tail_mask(num_queries, num_keys, heads_per_kv)
    out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.view(1, num_heads, num_queries, head_dim)


@lru_cache(maxsize=4)  # the layers of one forward ask for the same mask
def causal_tail_mask(num_queries: int, num_keys: int, num_repeats: int = 1) -> torch.Tensor:
    """Mask of queries that are the last keys, repeated along the query axis. Read it only.

    Returns:
        [num_repeats * num_queries, num_keys] bool, True where visible.
    """
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    return mask.repeat(num_repeats, 1)


def blockcompact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Builds the stock mask for sliding-window layers and none for full-attention layers.

    A full layer may hold fewer keys than its logical length, so a mask sized by the cache would be
    wrong for it; `blockcompact_attention` masks by the rule "the last keys are the queries' own".

    Raises:
        ValueError: for more than one sequence, or a padded one.
    """
    if batch_size != 1 or (attention_mask is not None and not bool(attention_mask.all())):
        raise ValueError(
            f"`{ATTENTION_NAME}` attention got a batch of {batch_size}"
            f"{' with padding' if attention_mask is not None else ''}; expected one unpadded "
            "sequence. Run the sequences one by one."
        )
    if local_size is None:
        return None
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        *args,
        attention_mask=attention_mask,
        local_size=local_size,
        **kwargs,
    )


def register() -> str:
    """Registers both functions with transformers (again is harmless) and returns their name."""
    AttentionInterface.register(ATTENTION_NAME, blockcompact_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, blockcompact_mask)
    return ATTENTION_NAME
