"""Drafts for vLLM's speculative decoding: the model itself, over the selected blocks.

vLLM asks after every step. All requests that have a selection draft together, one forward a token;
vLLM's next step verifies the drafts with full attention and its own rejection sampler, so the
output is stock vLLM's.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Int32
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from blockcompact_jax.budget import OptionError
from torch_bridge.huggingface.lookup import NgramLookup
from torch_bridge.vllm import sampler_kernels
from torch_bridge.vllm.backend import BlockCompactAttentionImpl, BlockCompactMetadataBuilder
from torch_bridge.vllm.config import CONFIG_KEY, parse_config
from torch_bridge.vllm.drafting import DraftTables, GroupDrafting, WindowDrafting
from torch_bridge.vllm.engine_checks import UnsupportedEngineError
from torch_bridge.vllm.requests import DecodingRequest

MAX_LOOKUP_TOKENS = 7
"""Most tokens of one draft forward that repetition in the text may suggest for a request."""


class SelfSpeculation:
    """A proposer of the kind `custom_class`."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """As vLLM constructs it, before it loads the model.

        Args:
            vllm_config: of the engine.

        Raises:
            OptionError: where the policy is not "lossless".
        """
        config = parse_config(vllm_config.additional_config)
        if config is None or config.policy != "lossless":
            raise OptionError(
                f"`speculative_config` names {type(self).__name__}, and `policy` is "
                f"{config and config.policy!r}, expected 'lossless'; pass additional_config="
                f"{{{CONFIG_KEY!r}: {{'policy': 'lossless', 'budget': '10%'}}}}"
            )
        sampler_kernels.register()
        self._vllm_config = vllm_config
        self._num_draft_tokens: int = vllm_config.num_speculative_tokens
        self._lookups: WeakKeyDictionary[DecodingRequest, NgramLookup] = WeakKeyDictionary()

    def load_model(self, model: torch.nn.Module) -> None:
        """Takes the engine's model, which drafts too.

        Args:
            model: the target model, loaded.

        Raises:
            UnsupportedEngineError: where its layers are not the plugin's, keep state of another
                kind, or none of them is of full attention.
        """
        layers = self._layers()
        for name, layer in get_layers_from_vllm_config(
            self._vllm_config, AttentionLayerBase
        ).items():
            if name not in layers:
                raise UnsupportedEngineError(
                    f"blockcompact cannot draft in this engine: its layer {name} is a "
                    f"{type(layer).__name__}, whose state drafts would change; leave "
                    f"`speculative_config` and {CONFIG_KEY!r} out"
                )
        if all(layer.sliding_window is not None for layer in layers.values()):
            raise UnsupportedEngineError(
                "blockcompact cannot draft in this engine: its model has no full-attention layers, "
                "and others have nothing to select; leave `speculative_config` and "
                f"{CONFIG_KEY!r} out"
            )
        for name, layer in layers.items():
            if not isinstance(layer.impl, BlockCompactAttentionImpl):
                raise UnsupportedEngineError(
                    f"blockcompact cannot draft in this engine: its layer {name} runs "
                    f"{type(layer.impl).__name__}, expected {BlockCompactAttentionImpl.__name__}, "
                    f"as vLLM's plugin {CONFIG_KEY!r} is not loaded; install blockcompact-jax in "
                    "the workers' environment, and leave VLLM_PLUGINS unset or name "
                    f"{CONFIG_KEY!r} in it"
                )
        self._model: Any = model

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Int32[np.ndarray, " max_batch"],
        token_ids_cpu: Int32[np.ndarray, "max_batch max_tokens"],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for every request that has a selection.

        Args:
            sampled_token_ids: tokens that each row of the batch gained in the step.
            num_tokens_no_spec: confirmed tokens of each row, these included.
            token_ids_cpu: the confirmed tokens themselves.
            slot_mappings: of the step's own tokens; not used.

        Returns:
            Drafted tokens of each row: none, or as many as vLLM asks for.
        """
        num_tokens = num_tokens_no_spec[: len(sampled_token_ids)].astype(np.int32)
        builders = self._builders()
        groups = [group for group in map(_drafting, builders) if isinstance(group, GroupDrafting)]
        selected = [set(group.finish_verification(num_tokens)) for group in groups]
        places = [
            place
            for place, sampled in enumerate(sampled_token_ids)
            if sampled and all(place in rows for rows in selected)
        ]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not places:
            return drafts
        contexts = [
            self._context(groups[0].request_at(place), token_ids_cpu[place], length)
            for place, length in zip(places, num_tokens[places].tolist(), strict=True)
        ]
        for place, drafted in zip(places, self._draft(builders, places, contexts), strict=True):
            drafts[place] = drafted
        return drafts

    def _context(
        self, request: DecodingRequest, token_ids: Int32[np.ndarray, " max_tokens"], length: int
    ) -> NgramLookup:
        """The request's confirmed tokens."""
        context = self._lookups.get(request)
        if context is None:
            context = self._lookups[request] = NgramLookup([])
        context.extend(token_ids[len(context) : length].tolist())
        return context

    def _draft(
        self,
        builders: list[BlockCompactMetadataBuilder],
        places: list[int],
        contexts: list[NgramLookup],
    ) -> list[list[int]]:
        """Tokens drafted for each row of `places`; the newest of its context has no KV yet.

        Repetition in the text suggests what the model will say. A suggestion is fed with the token
        before it and stands if it is what the model says, so drafts are as if fed one by one.
        """
        num_draft_tokens = self._num_draft_tokens
        num_tokens = np.array([len(context) for context in contexts], np.int32)
        tables = [
            _drafting(builder).draft_tables(places, num_tokens, num_draft_tokens=num_draft_tokens)
            for builder in builders
        ]
        drafts: list[list[int]] = [[] for _ in places]
        while rows := [
            row for row, drafted in enumerate(drafts) if len(drafted) < num_draft_tokens
        ]:
            suggested = [
                contexts[row].propose(
                    drafts[row], min(MAX_LOOKUP_TOKENS, num_draft_tokens - len(drafts[row]) - 1)
                )
                for row in rows
            ]
            fed = [
                [drafts[row][-1] if drafts[row] else contexts[row].newest, *tokens]
                for row, tokens in zip(rows, suggested, strict=True)
            ]
            first = [len(contexts[row]) - 1 + len(drafts[row]) for row in rows]
            forwarded = self._forward(builders, tables, rows, fed, first)
            for row, tokens, best in zip(rows, suggested, forwarded, strict=True):
                drafts[row] += best[: _num_standing(tokens, best) + 1]
        return drafts

    def _forward(
        self,
        builders: list[BlockCompactMetadataBuilder],
        tables: list[DraftTables],
        rows: list[int],
        fed: list[list[int]],
        first_positions: list[int],
    ) -> list[list[int]]:
        """The best next token after each token fed to each of `rows`."""
        num_queries = [len(tokens) for tokens in fed]
        ranges = [
            np.arange(first, first + count)
            for first, count in zip(first_positions, num_queries, strict=True)
        ]
        lengths = np.add(first_positions, num_queries, dtype=np.int32)
        metadata: dict[str, Any] = {}
        slot_mapping: dict[str, torch.Tensor] = {}
        for builder, table in zip(builders, tables, strict=True):
            step = _drafting(builder).draft_step(table, rows, lengths)
            slots = torch.from_numpy(table.slots(rows, ranges, block_tokens=builder.block_size))
            built = builder.build_draft(step, num_queries, slots)
            metadata |= dict.fromkeys(builder.layer_names, built)
            slot_mapping |= dict.fromkeys(builder.layer_names, slots)
        positions = torch.from_numpy(np.concatenate(ranges))
        with set_forward_context(
            metadata, self._vllm_config, num_tokens=positions.numel(), slot_mapping=slot_mapping
        ):
            hidden = self._model(
                input_ids=torch.tensor([token for tokens in fed for token in tokens]).int(),
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        best: list[int] = self._model.compute_logits(hidden).argmax(-1).tolist()
        ends = np.cumsum(num_queries)
        return [best[end - count : end] for end, count in zip(ends, num_queries, strict=True)]

    def _builders(self) -> list[BlockCompactMetadataBuilder]:
        """Of all attention layers, each once."""
        return list(dict.fromkeys(layer.impl.builder for layer in self._layers().values()))

    def _layers(self) -> dict[str, Any]:
        return get_layers_from_vllm_config(self._vllm_config, Attention)


def _num_standing(suggested: list[int], best: list[int]) -> int:
    for place, token in enumerate(suggested):
        if token != best[place]:
            return place
    return len(suggested)


def _drafting(builder: BlockCompactMetadataBuilder) -> GroupDrafting | WindowDrafting:
    group = builder.window or builder.compaction
    if not isinstance(group, GroupDrafting | WindowDrafting):
        raise RuntimeError(
            f"the layers {builder.layer_names} do not draft; this is a fault of blockcompact"
        )
    return group
