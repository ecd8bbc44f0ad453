"""vLLM's CPU attention backend, with the attend policy for full-attention groups.

The builder sees each step's block tables before any layer runs: it recognises the decoding
requests, gives each layer a table of the selected blocks and the tail, and vLLM's own kernel
attends to them. Every so often a request is scored: its newest query meets the keys of all its
blocks in a native call that gives each block's attention mass, and the next step's builder selects
anew.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from torch_bridge.versions import check_version
from torch_bridge.vllm.config import AttendConfig, parse_config

# vLLM loads this module wherever it is installed; JAX comes in only where compaction is on.
if TYPE_CHECKING:
    from torch_bridge.vllm.compaction import GroupCompaction, StepCompaction
    from torch_bridge.vllm.requests import RetainedRequests


logger = init_logger("vllm.blockcompact")  # under vLLM's own, so that its level and format hold


@dataclass
class CompactedMetadata(CPUAttentionMetadata):
    """Metadata of a step in which some rows attend to selected blocks.

    Attributes:
        step: what each layer attends to; None where every row attends to all its blocks.
    """

    step: StepCompaction | None = None


class BlockCompactMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds stock metadata, and compacted metadata for full-attention groups when asked to."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config = parse_config(vllm_config.additional_config)
        self.compaction: GroupCompaction | None = None
        if config is not None and isinstance(kv_cache_spec, FullAttentionSpec):
            self.compaction = self.make_compaction(config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Builds the metadata of a step; every layer of the group receives it."""
        common = common_attn_metadata
        if self.compaction is None:
            return super().build(common_prefix_len, common, fast_build)
        num_tokens = common.seq_lens[: common.num_reqs].numpy()
        num_queries = np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())
        is_decoding = num_queries == 1
        if common.is_prefilling is not None:  # a prompt's chunk may be one token long
            is_decoding &= ~common.is_prefilling[: common.num_reqs].numpy()
        step = self.compaction.begin_step(
            common.block_table_tensor[: common.num_reqs].numpy(), num_tokens, is_decoding
        )
        if step is None:
            return super().build(common_prefix_len, common, fast_build)
        compacted = replace(common, seq_lens=torch.from_numpy(step.tables.num_keys))
        metadata = super().build(common_prefix_len, compacted, fast_build)
        return CompactedMetadata(**vars(metadata), step=step)

    def make_compaction(self, config: AttendConfig) -> GroupCompaction:
        """The policy for this group.

        Args:
            config: the policy.

        Raises:
            UntestedVersionError: for a version of vLLM that was not tested.
            UnsupportedEngineError: for an engine that cannot be served.
        """
        from blockcompact_jax.geometry import ModelGeometry
        from torch_bridge.huggingface.geometry import DTYPE_NAMES
        from torch_bridge.vllm.compaction import GroupCompaction
        from torch_bridge.vllm.kv_blocks import LAYOUTS

        check_version("vLLM")
        self._check_engine()
        compaction = GroupCompaction(
            config,
            geometry=ModelGeometry.uniform(
                num_layers=len(self.layer_names),
                num_query_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                block_tokens=self.block_size,
                dtype=DTYPE_NAMES[self.dtype],
                layout=self.isa,
            ),
            layer_names=self.layer_names,
            layout=LAYOUTS[self.isa],
            max_tokens=self.vllm_config.model_config.max_model_len,
            retained=self._retained(config),
        )
        logger.info(
            "blockcompact is active: policy %s, budget %s, %d full-attention layers",
            config.policy,
            config.budget,
            len(self.layer_names),
        )
        return compaction

    def _retained(self, config: AttendConfig) -> RetainedRequests | None:
        if config.policy != "retain":
            return None
        from torch_bridge.vllm.engine_checks import HeadShape, check_retaining
        from torch_bridge.vllm.retain import retained_of

        layers: dict[str, Any] = get_layers_from_vllm_config(self.vllm_config, Attention)
        check_retaining(
            self.vllm_config,
            kv_cache_kind=_kind(self.kv_cache_spec),
            head_shapes={
                name: HeadShape(
                    num_query_heads=layer.num_heads,
                    num_kv_heads=layer.num_kv_heads,
                    head_dim=layer.head_size,
                )
                for name, layer in layers.items()
                if isinstance(layer.impl, BlockCompactAttentionImpl)
                and layer.sliding_window is None
            },
        )
        return retained_of(self.kv_cache_spec.engine)

    def _check_engine(self) -> None:
        from torch_bridge.vllm.engine_checks import AttentionFacts, check_engine

        layers: dict[str, Any] = get_layers_from_vllm_config(
            self.vllm_config, Attention, self.layer_names
        )
        impls = {name: layer.impl for name, layer in layers.items()}
        attention = AttentionFacts(
            isa=self.isa,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_kind=_kind(self.kv_cache_spec),
            num_layers=len(impls),
            num_windowed_layers=sum(impl.sliding_window != -1 for impl in impls.values()),
            biased_layers=tuple(
                name
                for name, impl in impls.items()
                if impl.sinks is not None
                or impl.alibi_slopes is not None
                or bool(impl.logits_soft_cap)
            ),
        )
        check_engine(self.vllm_config, attention)


def _kind(spec: Any) -> str:
    kind = type(spec).__name__
    if spec.attention_chunk_size is not None:
        kind += " in chunks"
    return kind + " without causality" if spec.non_causal else kind


class BlockCompactAttentionImpl(CPUAttentionBackendImpl):
    """Stock attention over the blocks that the step's metadata names for the layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        config = parse_config(vllm_config.additional_config)
        is_retaining = config is not None and config.policy == "retain"
        BlockCompactAttentionBackend.retaining_engine = (
            vllm_config.instance_id if is_retaining else None
        )

    def forward(  # noqa: PLR0917  # as vLLM calls it
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the stock implementation."""
        step = attn_metadata.step if isinstance(attn_metadata, CompactedMetadata) else None
        rest = (output_scale, output_block_scale)
        if step is None or attn_metadata is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *rest)
        # The group's layers share the metadata and run one after another.
        attn_metadata.block_table = step.block_table_by_layer_name[layer.layer_name]
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *rest)
        if step.has_scored_rows:
            step.score(
                layer.layer_name,
                kv_cache,
                query=query.view(-1, self.num_heads, self.head_size),
                first_query=attn_metadata.query_start_loc,
                scale=self.scale,
            )
        return output


class BlockCompactAttentionBackend(CPUAttentionBackend):
    """The stock CPU backend with our builder and implementation.

    Attributes:
        retaining_engine: the engine whose model this process loaded last, if it gives blocks back;
            vLLM asks for specifications when it no longer says which configuration they are for.
    """

    retaining_engine: ClassVar[str | None] = None

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The specification of a layer's cache; one of ours where blocks are given back."""
        if cls.retaining_engine is None:
            return super().customize_spec(spec)
        from torch_bridge.vllm.retain import register, retained_spec

        register()
        return retained_spec(super().customize_spec(spec), engine=cls.retaining_engine)

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation of a layer."""
        return BlockCompactAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return BlockCompactMetadataBuilder
