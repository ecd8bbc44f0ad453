"""What an engine must be like for compaction to serve it. Imports no vllm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge.vllm.config import PolicyName
from torch_bridge.vllm.kv_blocks import LAYOUTS

_PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


_KV_CACHE_KINDS = {"FullAttentionSpec", "RetainedAttentionSpec", "LookaheadAttentionSpec"}

PROPOSER = "torch_bridge.vllm.proposer.SelfSpeculation"
"""The class that vLLM's `speculative_config` names under the policy "lossless"."""

_KINDS_WITH_ROOM = {"LookaheadAttentionSpec", "LookaheadWindowSpec"}

_MAX_DRAFT_TOKENS = 128  # vLLM's MAX_SPEC_LEN


class UnsupportedEngineError(ValueError):
    """An engine configuration that compaction cannot serve."""


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """What the attention layers of one full-attention group are like.

    Attributes:
        isa: vLLM's name of the layout that it packs KV in.
        dtype: of the model.
        kv_cache_dtype: as configured.
        kv_cache_kind: class of the group's KV-cache specification, and what is special about it.
        num_layers: layers of the group.
        num_windowed_layers: those that attend to a sliding window.
        biased_layers: layers whose logits are more than scaled products.
    """

    isa: str
    dtype: torch.dtype
    kv_cache_dtype: str
    kv_cache_kind: str
    num_layers: int
    num_windowed_layers: int
    biased_layers: tuple[str, ...]


def check_engine(config: Any, attention: AttentionFacts, *, policy: PolicyName = "attend") -> None:
    """Refuses an engine that compaction cannot serve.

    Args:
        config: vLLM's `VllmConfig`.
        attention: of the group.
        policy: what the engine is to do.

    Raises:
        UnsupportedEngineError: with the first fault and its remedy.
    """
    for fault in (
        *_faults_of_attention(attention),
        *(_faults_of_drafting(config) if policy == "lossless" else ()),
        *(_faults_of_room(attention.kv_cache_kind) if policy == "lossless" else ()),
        *_faults_of_config(config),
        *(() if policy == "lossless" else _faults_of_speculation(config)),
    ):
        raise UnsupportedEngineError(f"blockcompact cannot serve this engine: {fault}")


def check_window(kv_cache_kind: str) -> None:
    """Refuses a group beside full attention in which drafts have no room.

    Args:
        kv_cache_kind: class of its KV-cache specification, and what is special about it.

    Raises:
        UnsupportedEngineError: for a kind that is not sliding-window attention of ours.
    """
    for fault in _faults_of_room(kv_cache_kind):
        raise UnsupportedEngineError(f"blockcompact cannot serve this engine: {fault}")


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """What full-attention layers that are scored together have in common."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int


def check_retaining(
    config: Any, *, kv_cache_kind: str, head_shapes: Mapping[str, HeadShape]
) -> None:
    """Refuses an engine whose blocks cannot be given back.

    Args:
        config: vLLM's `VllmConfig`.
        kv_cache_kind: class of the group's KV-cache specification.
        head_shapes: of every full-attention layer, by its name.

    Raises:
        UnsupportedEngineError: with the first fault and its remedy.
    """
    faults = (*_faults_of_retaining(config, kv_cache_kind), *_faults_of_shapes(head_shapes))
    for fault in faults:
        raise UnsupportedEngineError(
            f"blockcompact cannot give blocks back in this engine: {fault}"
        )


def _faults_of_retaining(config: Any, kv_cache_kind: str) -> Iterator[str]:
    if kv_cache_kind != "RetainedAttentionSpec":
        yield (
            f"vLLM uses a KV cache of the kind {kv_cache_kind}, expected the one that the backend "
            "asked for; use a tested version of vLLM"
        )
    if config.scheduler_config.async_scheduling:
        yield (
            "asynchronous scheduling is on, which frees blocks before their last step is known; "
            "pass async_scheduling=False"
        )
    executor = config.parallel_config.distributed_executor_backend
    if executor not in {None, "uni"}:
        yield (
            f"its executor is {executor!r}, and the worker and the scheduler must share a process; "
            "set the environment variable VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM starts (on "
            "CPUs it turns 'uni' into 'mp' otherwise), and leave `distributed_executor_backend` out"
        )


def _faults_of_shapes(head_shapes: Mapping[str, HeadShape]) -> Iterator[str]:
    """Layers that differ get a builder each, on one block table."""
    first = next(iter(head_shapes), None)
    for name, shape in head_shapes.items():
        if first is not None and shape != head_shapes[first]:
            yield (
                f"its full-attention layers differ: {first} has {head_shapes[first]}, {name} has "
                f"{shape}, and layers that share a block table must select together; use the "
                "policy 'attend'"
            )


def _faults_of_attention(attention: AttentionFacts) -> Iterator[str]:
    if attention.kv_cache_dtype != "auto":
        yield (
            f"its KV-cache dtype is {attention.kv_cache_dtype!r}, expected 'auto'; leave "
            "`kv_cache_dtype` out"
        )
    if attention.dtype not in {torch.float32, torch.bfloat16}:
        yield (
            f"its dtype is {attention.dtype}, expected float32 or bfloat16; pass dtype='bfloat16'"
        )
    if attention.isa not in LAYOUTS:
        yield (
            f"its attention packs KV as {attention.isa!r}, expected one of {', '.join(LAYOUTS)}; "
            "these need an x86 CPU, and a block size and a head size that are multiples of 32"
        )
    if attention.kv_cache_kind not in _KV_CACHE_KINDS:
        yield (
            f"it has a KV cache of the kind {attention.kv_cache_kind}, expected plain causal "
            "FullAttentionSpec; this model is not supported"
        )
    if attention.num_windowed_layers:
        yield (
            f"{attention.num_windowed_layers} of {attention.num_layers} layers of a full-attention "
            "KV-cache group attend to a sliding window; pass disable_hybrid_kv_cache_manager=False"
        )
    if attention.biased_layers:
        yield (
            f"layer {attention.biased_layers[0]} uses attention sinks, ALiBi or soft-capped "
            "logits, which block scores do not know; this model is not supported"
        )


def _faults_of_config(config: Any) -> Iterator[str]:
    if config.cache_config.enable_prefix_caching:
        yield (
            "prefix caching is on, and KV computed from compacted attention must never be a hit; "
            "pass enable_prefix_caching=False"
        )
    if config.kv_transfer_config is not None:
        yield (
            "a KV connector is configured, and KV computed from compacted attention must not leave "
            "the engine; leave `kv_transfer_config` and KV offloading out"
        )
    for name in _PARALLEL_SIZES:
        size = getattr(config.parallel_config, name, 1)
        if size != 1:
            yield f"`{name}` is {size}, which was not tested; expected 1"


def _faults_of_speculation(config: Any) -> Iterator[str]:
    if config.speculative_config is not None:
        yield (
            "speculative decoding is on, and its verification would be compacted too; leave "
            "`speculative_config` out, or use the policy 'lossless'"
        )


def _faults_of_drafting(config: Any) -> Iterator[str]:
    given = config.speculative_config
    if given is None or given.method != "custom_class" or given.model != PROPOSER:
        named = None if given is None else f"{given.method} {given.model}"
        yield (
            f"its proposer is {named}, and the policy 'lossless' drafts with its own; pass "
            f"speculative_config={{'method': 'custom_class', 'model': {PROPOSER!r}, "
            "'num_speculative_tokens': 8}"
        )
    elif given.num_speculative_tokens > _MAX_DRAFT_TOKENS:
        yield (
            f"`num_speculative_tokens` is {given.num_speculative_tokens}, expected at most "
            f"{_MAX_DRAFT_TOKENS}, which is all that vLLM's sampler verifies; 8 is a good start"
        )
    if config.scheduler_config.async_scheduling:
        yield (
            "asynchronous scheduling is on, which plans a step before the drafts for it are known; "
            "pass async_scheduling=False"
        )
    if config.lora_config is not None:
        yield "LoRA is on, and drafts would run without its adapters; leave `enable_lora` out"
    if config.model_config.is_multimodal_model:
        yield "its model takes images or sound, and drafts know tokens alone; use a text model"


def _faults_of_room(kv_cache_kind: str) -> Iterator[str]:
    if kv_cache_kind not in _KINDS_WITH_ROOM:
        yield (
            f"a layer has a KV cache of the kind {kv_cache_kind}, and drafts need room behind the "
            "tokens of every layer, which plain full and sliding-window attention have; use the "
            "policy 'attend'"
        )
