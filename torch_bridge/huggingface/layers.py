"""Which attention every decoder layer of a model uses, and which models are refused."""

from __future__ import annotations

from transformers import PreTrainedConfig


class UnsupportedModelError(ValueError):
    """A model whose attention or KV cache this engine does not know."""


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The attention kind of every decoder layer, in order.

    Args:
        config: the text config of a decoder-only model.

    Returns:
        "full_attention" or "sliding_attention" for each layer; at least one is full.

    Raises:
        UnsupportedModelError: for another kind, no full-attention layer, or no description of
            key/value heads.
    """
    missing = [
        name
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        if getattr(config, name, None) is None
    ]
    if missing:
        raise UnsupportedModelError(
            f"the config of {config.model_type} has no `{missing[0]}`; expected a decoder-only "
            "model with grouped key/value heads. This architecture is not supported."
        )
    default = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"the config of {config.model_type} has layers of kind {', '.join(sorted(unknown))}; "
            "expected full_attention or sliding_attention. This architecture is not supported."
        )
    if "full_attention" not in kinds:
        raise UnsupportedModelError(
            f"every layer of {config.model_type} attends to a sliding window only; expected at "
            "least one full-attention layer. There is nothing to compact."
        )
    return list(kinds)
