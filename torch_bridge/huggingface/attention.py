"""The attention function and mask function registered with transformers.

Full-attention layers attend over the blocks of their cache: the whole KV when verifying, the
resident blocks when drafting. In both the last `num_queries` keys are the queries' own, so one rule
gives the causal mask for any block table. A `BlockAttention` reads the blocks in place; with a
gathering cache the keys and values that the cache layer handed out are attended to. Keys of an
`AttendCache` name their layer, which attends itself. All else, sliding-window layers too, gets the
stock mask and goes to the stock function: models keep working under this name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from torch_bridge.huggingface.block_attention import BlockAttention
from torch_bridge.huggingface.layers import UnsupportedModelError
from torch_bridge.versions import check_version

_CHANGES_ATTENTION = ("s_aux", "softcap", "position_bias", "sinks", "head_mask")
"""Keywords with which some models ask for another attention than softmax over scaled products."""

ATTENTION_NAME = "blockcompact"
"""The `attn_implementation` under which the functions of this module are registered."""

STOCK_ATTENTION = "sdpa"
"""The implementation that models must have, and get back."""

BLOCKS_KEYWORD = "blockcompact_blocks"
"""Keyword of the model's forward that carries a `BlockAttention` to every attention layer."""

KEY_OWNER = "blockcompact_layer"
"""Attribute of a key tensor: the cache layer that handed it out and attends in its place."""

_is_over_blocks: ContextVar[bool] = ContextVar("blockcompact_is_over_blocks", default=False)
"""Whether the forward that runs in this thread is one of a session."""

_num_borrowers: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


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
        query: [batch, num_query_heads, num_queries, head_dim], rotated; batch is 1 in a session.
        key: [batch, num_kv_heads, num_keys, head_dim] as the cache layer returned it; where it is
            ours, the last num_queries are the queries' own.
        value: as `key`.
        attention_mask: what `blockcompact_mask` gave.
        scaling: softmax scale; None means head_dim ** -0.5.
        dropout: must be 0 over a cache of ours (inference only).
        **kwargs: `sliding_window` marks a sliding-window layer; `BLOCKS_KEYWORD` is where blocks
            are read in place and scored.

    Returns:
        ([batch, num_queries, num_query_heads, head_dim], None).

    Raises:
        ValueError: if, over a cache of ours, dropout is asked for, or a session's full-attention
            layer receives a mask.
        UnsupportedModelError: if the model asks there for another kind of attention.
    """
    blocks: BlockAttention | None = kwargs.pop(BLOCKS_KEYWORD, None)
    owner = getattr(key, KEY_OWNER, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    is_full = kwargs.get("sliding_window") is None
    if is_full and blocks is not None:
        check_supported(module, dropout, attention_mask, kwargs)
        return _attend_in_session(blocks, module, query, key, value, scale=scale), None
    if is_full and owner is not None:
        check_supported(module, dropout, None, kwargs)
        out = owner.attend(query, key, value, module=module, mask=attention_mask, scale=scale)
        return out, None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def check_supported(
    module: torch.nn.Module, dropout: float, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> None:
    """Refuses attention that is more than softmax over scaled products of one unpadded sequence.

    Raises:
        ValueError: for dropout or a mask.
        UnsupportedModelError: for a keyword that changes what attention computes.
    """
    foreign = [name for name in _CHANGES_ATTENTION if kwargs.get(name) is not None]
    if foreign:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes `{foreign[0]}` to attention, which the "
            f"`{ATTENTION_NAME}` attention does not compute; this architecture is not supported."
        )
    if dropout or mask is not None:
        raise ValueError(
            f"`{ATTENTION_NAME}` attention got dropout={dropout} and "
            f"{'a' if mask is not None else 'no'} mask for a full-attention layer; "
            "expected inference on one unpadded sequence. Call `model.eval()` and pass no mask."
        )


def _attend_in_session(
    blocks: BlockAttention,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    layer: int = module.layer_idx  # type: ignore[assignment]
    if blocks.has_more_than_handed_out(layer):
        return blocks.attend(layer, query, scale)
    blocks.score(layer, query, scale)
    return causal_tail_attention(query, key, value, scale).transpose(1, 2).contiguous()


def causal_tail_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention whose queries are the last keys; the stock call where there is one.

    Args:
        query: [1, num_query_heads, num_queries, head_dim].
        key: [1, num_kv_heads, num_keys, head_dim].
        value: as `key`.
        scale: softmax scale.

    Returns:
        As `query`.
    """
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
    *args: Any, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """Builds the stock mask, except for the full-attention layers of a session's forward.

    Such a layer may hold fewer keys than its logical length, so a mask sized by the cache would be
    wrong for it; `blockcompact_attention` masks by the rule "the last keys are the queries' own".
    An `AttendCache` reads off the stock mask what is padding.
    """
    if _is_over_blocks.get() and local_size is None:
        return None
    return sdpa_mask(*args, local_size=local_size, **kwargs)


@contextmanager
def attention_over_blocks() -> Iterator[None]:
    """Runs a session's forward: its full-attention layers get no mask."""
    token = _is_over_blocks.set(True)
    try:
        yield
    finally:
        _is_over_blocks.reset(token)


def register() -> str:
    """Registers both functions with transformers (again is harmless) and returns their name."""
    AttentionInterface.register(ATTENTION_NAME, blockcompact_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, blockcompact_mask)
    return ATTENTION_NAME


def check_attention(model: PreTrainedModel) -> None:
    """Refuses a model whose attention cannot be borrowed.

    Raises:
        UnsupportedModelError: if the model's own attention is not scaled dot-product attention.
        UntestedVersionError: for a version of transformers that was not tested.
    """
    check_version("transformers")
    name = model.config._attn_implementation  # no public getter exists
    if name != STOCK_ATTENTION and not _num_borrowers.get(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} uses the attention implementation {name!r}; expected 'sdpa'. "
            "Load it with attn_implementation='sdpa'; a model that refuses it is not supported."
        )


def borrow_attention(model: PreTrainedModel) -> None:
    """Gives a model this attention until as many `return_attention` as `borrow_attention`.

    Raises:
        UnsupportedModelError: if the model's own attention is not scaled dot-product attention.
        UntestedVersionError: for a version of transformers that was not tested.
    """
    check_attention(model)
    model.set_attn_implementation(register())
    _num_borrowers[model] = _num_borrowers.get(model, 0) + 1


def return_attention(model: PreTrainedModel) -> None:
    """Gives the model its own attention back once nobody borrows it any more."""
    _num_borrowers[model] -= 1
    if not _num_borrowers[model]:
        model.set_attn_implementation(STOCK_ATTENTION)
