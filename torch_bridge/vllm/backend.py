"""vLLM's CPU attention backend, with a policy for full-attention groups.

The builder sees each step's block tables before any layer runs: it recognises the decoding
requests, gives each layer a table of the selected blocks and the tail, and vLLM's own kernel
attends to them. Every so often a request is scored: its newest query meets the keys of all its
blocks in a native call that gives each block's attention mass, and the next step's builder selects
anew. Under the lossless policy all that holds for drafts, whose forwards the proposer runs; vLLM's
own steps attend to everything.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
    from torch_bridge.vllm.drafting import WindowDrafting
    from torch_bridge.vllm.requests import RetainedRequests
    from torch_bridge.vllm.steps import StepTables


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
        self.window: WindowDrafting | None = None
        if config is None:
            return
        if isinstance(kv_cache_spec, FullAttentionSpec):
            self.compaction = self.make_compaction(config)
        elif config.policy == "lossless":
            self.window = self._make_window()
        layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        for layer in layers.values():
            layer.impl.builder = self  # where the proposer finds it

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Builds the metadata of a step; every layer of the group receives it."""
        common = common_attn_metadata
        if self.window is not None:
            self.window.begin_verification(common.block_table_tensor[: common.num_reqs].numpy())
        step = None if self.compaction is None else self._begin_step(self.compaction, common)
        if step is None:
            return super().build(common_prefix_len, common, fast_build)
        compacted = replace(common, seq_lens=torch.from_numpy(step.tables.num_keys))
        metadata = super().build(common_prefix_len, compacted, fast_build)
        return CompactedMetadata(**vars(metadata), step=step)

    def _begin_step(
        self, compaction: GroupCompaction, common: CommonAttentionMetadata
    ) -> StepCompaction | None:
        from torch_bridge.vllm.drafting import GroupDrafting

        block_table = common.block_table_tensor[: common.num_reqs].numpy()
        num_tokens = common.seq_lens[: common.num_reqs].numpy()
        num_queries = np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())
        is_decoding = np.ones(common.num_reqs, np.bool_)
        if common.is_prefilling is not None:  # a prompt's chunk may be one token long
            is_decoding = ~common.is_prefilling[: common.num_reqs].numpy()
        if isinstance(compaction, GroupDrafting):
            return compaction.begin_verification(block_table, num_tokens, num_queries, is_decoding)
        return compaction.begin_step(block_table, num_tokens, is_decoding & (num_queries == 1))

    def build_draft(
        self,
        step: StepCompaction | StepTables,
        num_queries: list[int],
        slot_mapping: torch.Tensor,
    ) -> CPUAttentionMetadata:
        """Builds the metadata of a forward that drafts.

        Args:
            step: what it attends to; tables alone where the layers share one.
            num_queries: tokens of each row.
            slot_mapping: int64 [tokens], where their KV goes.
        """
        from torch_bridge.vllm.compaction import StepCompaction

        tables = step.tables if isinstance(step, StepCompaction) else step
        num_keys = torch.from_numpy(tables.num_keys)
        first_query = torch.tensor([0, *np.cumsum(num_queries)], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=first_query,
            query_start_loc_cpu=first_query,
            seq_lens=num_keys,
            num_reqs=len(num_queries),
            num_actual_tokens=sum(num_queries),
            max_query_len=max(num_queries),
            max_seq_len=int(num_keys.max()),
            block_table_tensor=torch.from_numpy(tables.block_table[0]),
            slot_mapping=slot_mapping,
        )
        metadata = super().build(0, common)
        if not isinstance(step, StepCompaction):
            return metadata
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
        from torch_bridge.vllm.drafting import GroupDrafting
        from torch_bridge.vllm.estimating import GroupEstimation
        from torch_bridge.vllm.hosting import GroupHosting
        from torch_bridge.vllm.kv_blocks import LAYOUTS

        check_version("vLLM")
        self._check_engine(config)
        kind: Callable[..., GroupCompaction] = GroupCompaction
        if config.policy == "lossless":
            kind = GroupDrafting
        elif config.host_bytes is not None:
            kind = partial(GroupHosting, host_bytes=self._host_bytes(config.host_bytes))
        elif config.select_by == "estimate":
            kind = GroupEstimation
        compaction = kind(
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
            "blockcompact is active: policy %s, budget %s, selections by %s, "
            "%d full-attention layers",
            config.policy,
            config.budget,
            config.select_by,
            len(self.layer_names),
        )
        return compaction

    def _host_bytes(self, host_bytes: int) -> int:
        """This group's share of the host's memory, by its layers."""
        layers: dict[str, Any] = get_layers_from_vllm_config(self.vllm_config, Attention)
        num_full_layers = sum(layer.sliding_window is None for layer in layers.values())
        return host_bytes * len(self.layer_names) // num_full_layers

    def _make_window(self) -> WindowDrafting:
        from torch_bridge.vllm.drafting import WindowDrafting
        from torch_bridge.vllm.engine_checks import check_window

        check_version("vLLM")
        check_window(_kind(self.kv_cache_spec))
        return WindowDrafting()

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

    def _check_engine(self, config: AttendConfig) -> None:
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
        check_engine(self.vllm_config, attention, policy=config.policy)


def _kind(spec: Any) -> str:
    kind = type(spec).__name__
    if getattr(spec, "attention_chunk_size", None) is not None:  # not every kind has it
        kind += " in chunks"
    return kind + " without causality" if getattr(spec, "non_causal", False) else kind


class BlockCompactAttentionImpl(CPUAttentionBackendImpl):
    """Stock attention over the blocks that the step's metadata names for the layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        config = parse_config(vllm_config.additional_config)
        BlockCompactAttentionBackend.make_spec = _make_spec(vllm_config, config)
        self.builder: BlockCompactMetadataBuilder | None = None

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
        step.move(layer.layer_name, kv_cache)
        queries = {
            "query": query.view(-1, self.num_heads, self.head_size),
            "first_query": attn_metadata.query_start_loc,
            "scale": self.scale,
        }
        step.select(layer.layer_name, kv_cache, **queries)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *rest)
        if step.has_scored_rows:
            step.score(layer.layer_name, kv_cache, **queries)
        return output


def _make_spec(vllm_config: VllmConfig, config: AttendConfig | None) -> Callable[[Any], Any] | None:
    if config is None:
        return None
    if config.policy == "retain":
        from torch_bridge.vllm.retain import retained_spec

        return partial(retained_spec, engine=vllm_config.instance_id)
    if config.policy == "lossless":
        from torch_bridge.vllm.lookahead import lookahead_spec

        return partial(
            lookahead_spec,
            num_lookahead_tokens=vllm_config.num_speculative_tokens,
            max_tokens=vllm_config.model_config.max_model_len,
            has_window_groups=not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        )
    return None


class BlockCompactAttentionBackend(CPUAttentionBackend):
    """The stock CPU backend with our builder and implementation.

    Attributes:
        make_spec: turns vLLM's specification of a layer's cache into one of ours, for the engine
            whose model this process loaded last, if its policy needs that; vLLM asks for
            specifications when it no longer says which configuration they are for.
    """

    make_spec: ClassVar[Callable[[Any], Any] | None] = None

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The specification of a layer's cache; one of ours where the policy needs it."""
        stock = super().customize_spec(spec)
        return stock if cls.make_spec is None else cls.make_spec(stock)

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation of a layer."""
        return BlockCompactAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return BlockCompactMetadataBuilder
