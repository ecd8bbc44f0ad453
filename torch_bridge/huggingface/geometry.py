"""Geometry of a transformers model, from its config."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels.layouts import Layout
from torch_bridge.huggingface.layers import UnsupportedModelError, layer_types

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Names that geometry gives the supported KV dtypes."""


def geometry_of(
    config: PreTrainedConfig, *, block_tokens: int, dtype: torch.dtype, layout: Layout
) -> ModelGeometry:
    """Reads layer kinds, heads and windows off a model's text config.

    Args:
        config: the text config of a decoder-only model.
        block_tokens: tokens a block.
        dtype: KV element type.
        layout: packed layout of the CPU store.

    Returns:
        The geometry; full-attention layers form one group, sliding-window layers another.

    Raises:
        UnsupportedModelError: for an architecture or a dtype that is not supported.
    """
    if dtype not in DTYPE_NAMES:
        raise UnsupportedModelError(
            f"`dtype` is {dtype}; expected one of {sorted(DTYPE_NAMES.values())}."
        )
    kinds = layer_types(config)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return ModelGeometry.uniform(
        num_layers=len(kinds),
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=DTYPE_NAMES[dtype],
        layout=layout.label,
        window_by_layer=[
            config.sliding_window if kind == "sliding_attention" else None for kind in kinds
        ],
    )
