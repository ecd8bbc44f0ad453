"""What the two sides of a remote session compare at the handshake."""

from __future__ import annotations

import hashlib

import torch
from transformers import PreTrainedModel

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.protocol import Capabilities, capabilities_of
from blockcompact_jax.upload import SourceKind
from torch_bridge.huggingface.options import AttentionName

_SAMPLED_BYTES = 4096


def weights_name(model: PreTrainedModel) -> str:
    """Names weights by architecture and a digest of every parameter's shape and first bytes."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[: _SAMPLED_BYTES // flat.element_size()].contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return f"{model.config.model_type}@{digest.hexdigest()[:24]}"


def capabilities(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    *,
    attention: AttentionName,
    process_epoch: int,
    source_kinds: frozenset[SourceKind],
) -> Capabilities:
    """Returns what a side with this model says of itself.

    The method names how full KV is attended to: both sides must do it the same way, bit for bit.
    """
    return capabilities_of(
        geometry,
        model=weights_name(model),
        process_epoch=process_epoch,
        method=f"block/{attention}",
        source_kinds=source_kinds,
    )
