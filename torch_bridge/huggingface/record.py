"""Records the queries and keys of a model along one text, for studies that need no model run."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from blockcompact_jax.budget import OptionError
from blockcompact_jax.provenance import origin
from blockcompact_jax.traces.trace import TRACE_DTYPES, AttentionTrace
from torch_bridge.huggingface.attention import check_attention, check_supported
from torch_bridge.huggingface.geometry import DTYPE_NAMES
from torch_bridge.huggingface.identity import weights_name
from torch_bridge.huggingface.layers import layer_types
from torch_bridge.huggingface.options import check_counts
from torch_bridge.models.load import LoadedModel
from torch_bridge.models.progress import SilentObserver, StageObserver
from torch_bridge.prompts import build_forced_text

_ATTENTION_NAME = "blockcompact_record"
_STORED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What is recorded. Checked when constructed.

    Attributes:
        prompt: Text; None for the built-in long prompt. Not together with `prompt_file`.
        prompt_file: UTF-8 file that holds the text.
        context_tokens: Tokens of the context.
        forced_tokens: Tokens of the same text after it, whose queries measure selections.
        context_queries: Newest queries of the context that are recorded; they select first.
        query_every: Every how many forced tokens a query is recorded.
        layers: Decoder layer IDs to record, full-attention ones; None for all of those.
        store_dtype: Element type of the trace, "float32" or "bfloat16"; None for the model's.
    """

    prompt: str | None = None
    prompt_file: Path | None = None
    context_tokens: int = 1024
    forced_tokens: int = 128
    context_queries: int = 16
    query_every: int = 1
    layers: tuple[int, ...] | None = None
    store_dtype: str | None = None

    def __post_init__(self) -> None:
        check_counts(
            context_tokens=self.context_tokens,
            forced_tokens=self.forced_tokens,
            context_queries=self.context_queries,
            query_every=self.query_every,
        )
        if self.context_queries > self.context_tokens:
            raise OptionError(
                f"`context_queries` is {self.context_queries}, expected at most the "
                f"{self.context_tokens} context tokens"
            )
        if self.layers is not None and not self.layers:
            raise OptionError("`layers` is empty, expected at least one decoder layer ID")
        if self.store_dtype is not None and self.store_dtype not in TRACE_DTYPES:
            raise OptionError(
                f"`store_dtype` is {self.store_dtype!r}, expected one of {', '.join(TRACE_DTYPES)}"
            )

    @property
    def query_positions(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Token positions whose queries are recorded, ascending. int32 [query]."""
        end = self.context_tokens + self.forced_tokens
        newest = np.arange(self.context_tokens - self.context_queries, self.context_tokens)
        forced = np.arange(self.context_tokens, end, self.query_every)
        return np.concatenate([newest, forced]).astype(np.int32)


class _Recorder:
    """Stock attention that keeps some queries and all keys of the wanted layers."""

    def __init__(
        self, layers: list[int], positions: torch.Tensor, dtype: torch.dtype, watcher: StageObserver
    ) -> None:
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._positions, self._dtype, self._watcher = positions, dtype, watcher
        self._num_done = 0
        self.parts: list[tuple[torch.Tensor, torch.Tensor, float] | None] = [None] * len(layers)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        """Keeps what is wanted of a layer, then attends as the stock attention does."""
        layer = int(module.layer_idx)
        if layer in self._rows:
            check_supported(module, kwargs.get("dropout", 0.0), None, kwargs)
            scale = kwargs.get("scaling")
            self.parts[self._rows[layer]] = (
                query[0].index_select(1, self._positions).to(self._dtype),
                key[0].to(self._dtype, copy=True),
                query.shape[-1] ** -0.5 if scale is None else float(scale),
            )
        self._num_done += 1
        self._watcher.on_progress(self._num_done)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


_recorder: ContextVar[_Recorder] = ContextVar("recorder")
"""Who records in the forward that runs; transformers' registry would keep it for good."""


def _attend(*args: Any, **kwargs: Any) -> Any:
    return _recorder.get().attend(*args, **kwargs)


def record_trace(
    options: RecordOptions, loaded: LoadedModel, *, observer: StageObserver | None = None
) -> AttentionTrace:
    """Runs the model once over the text, with stock attention, and keeps queries and keys.

    Args:
        options: What to record.
        loaded: The model, which others may borrow; its attention is what it was again afterwards.
        observer: Hears of progress, in layers.

    Raises:
        OptionError: If the text is too short, exceeds the model's positions, or a layer is none of
            full attention.
        PromptError: If the prompt cannot be used.
        UnsupportedModelError: If the model's attention is not known.
    """
    model = loaded.model
    check_attention(model)
    kinds = layer_types(model.config.get_text_config(decoder=True))
    layers = _wanted_layers(options, kinds)
    prompt = build_forced_text(
        loaded,
        context_tokens=options.context_tokens,
        forced_tokens=options.forced_tokens,
        prompt=options.prompt,
        prompt_file=options.prompt_file,
    )
    dtype_name = options.store_dtype or DTYPE_NAMES[model.dtype]
    if dtype_name not in _STORED_DTYPES:
        raise OptionError(
            f"`store_dtype` is not given and the model's dtype is {dtype_name}, expected one of "
            f"{', '.join(_STORED_DTYPES)}; give `store_dtype`"
        )
    watcher = observer or SilentObserver()
    watcher.on_stage(f"recording {prompt.num_tokens:,} tokens", len(kinds))
    positions = options.query_positions
    recorder = _Recorder(layers, torch.from_numpy(positions), _STORED_DTYPES[dtype_name], watcher)
    _run(model, prompt.token_ids, recorder)
    parts = [part for part in recorder.parts if part is not None]
    return AttentionTrace(
        model=loaded.name,
        weights=weights_name(model),
        model_dtype=DTYPE_NAMES[model.dtype],
        dtype=dtype_name,
        source=prompt.source,
        num_context_tokens=options.context_tokens,
        num_model_layers=len(kinds),
        layers=np.array(layers, np.int32),
        scales=np.array([scale for _, _, scale in parts], np.float32),
        token_ids=np.array(prompt.token_ids, np.int32),
        query_positions=positions,
        queries=_to_numpy(torch.stack([query for query, _, _ in parts]), dtype_name),
        keys=_to_numpy(torch.stack([key for _, key, _ in parts]), dtype_name),
        origin=origin(),
    )


def _run(model: Any, token_ids: list[int], recorder: _Recorder) -> None:
    AttentionInterface.register(_ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(_ATTENTION_NAME, sdpa_mask)
    name_before = model.config._attn_implementation  # its own, or that of whoever borrows the model
    token = _recorder.set(recorder)
    model.set_attn_implementation(_ATTENTION_NAME)
    try:
        with torch.inference_mode():
            model(torch.tensor([token_ids]), use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(name_before)
        _recorder.reset(token)


def _wanted_layers(options: RecordOptions, kinds: list[str]) -> list[int]:
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    wanted = full if options.layers is None else sorted(set(options.layers))
    unknown = [layer for layer in wanted if layer not in full]
    if unknown:
        raise OptionError(
            f"`layers` names layer {unknown[0]}, which is no full-attention layer of the model; "
            f"expected some of {', '.join(map(str, full))}"
        )
    return wanted


def _to_numpy(tensor: torch.Tensor, dtype_name: str) -> np.ndarray[Any, Any]:
    if dtype_name == "bfloat16":
        return tensor.view(torch.uint16).numpy().view(TRACE_DTYPES[dtype_name])
    return tensor.numpy()
