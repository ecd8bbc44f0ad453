"""A cache for `generate()` whose decoding attends to selected blocks only: the *attend* policy.

    with AttendCache(model, budget="25%") as cache:
        model.generate(**inputs, past_key_values=cache, max_new_tokens=64)

**Lossy**: what is generated is what a model generates that sees a part of its context. A budget of
100 % sees all of it. Decoding that changes no token is `lossless_generate`.
"""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from blockcompact_jax.budget import Budget, check_budget, parse_budget
from blockcompact_jax.kernels import Layout
from torch_bridge.held import EveryTokens, HoldingPeriod, check_every_tokens, open_log
from torch_bridge.huggingface.attend_checks import FIRST_TOKENS, check_model, period_of
from torch_bridge.huggingface.attend_sequence import AttendSequence
from torch_bridge.huggingface.attention import (
    ATTENTION_NAME,
    KEY_OWNER,
    borrow_attention,
    return_attention,
)
from torch_bridge.huggingface.full_layer import FullAttentionLayer
from torch_bridge.huggingface.layers import UnsupportedModelError, layer_types
from torch_bridge.huggingface.options import (
    AttentionName,
    LayoutName,
    SelectionName,
    check_counts,
    check_names,
)
from torch_bridge.huggingface.padding import num_padding_tokens
from torch_bridge.huggingface.sizes import store_sizes
from torch_bridge.selector import Selector

_FAILED = -1


class AttendLayer(FullAttentionLayer):
    """One full-attention layer: hands out the new keys only, and attends itself."""

    is_croppable = False

    def __init__(self, cache: AttendCache, layer_row: int) -> None:
        super().__init__()
        self._cache = cache
        self._row = layer_row

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes note of new tokens; `attend` stores them.

        Args:
            key_states: [batch, num_kv_heads, num_new, head_dim], rotated.
            value_states: as `key_states`.
            *args: ignored.
            **kwargs: ignored.

        Returns:
            The same tensors; the keys name this layer to the attention function.
        """
        num_tokens = self.length + key_states.shape[2]
        self._cache.check_forward(self._row, num_tokens)
        self.length = num_tokens
        setattr(key_states, KEY_OWNER, self)
        return key_states, value_states

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        module: torch.nn.Module,
        mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Stores the new tokens and attends; the attention function calls it.

        Args:
            query: [batch, num_query_heads, num_new, head_dim], rotated.
            key: [batch, num_kv_heads, num_new, head_dim], what `update` returned.
            value: as `key`.
            module: the attention module.
            mask: bool [batch, 1, num_new, num_tokens] where the batch is padded, else None.
            scale: softmax scale.

        Returns:
            [batch, num_new, num_query_heads, head_dim].
        """
        cache, row = self._cache, self._row
        is_first = self.length == key.shape[2]
        if row == 0:
            cache.begin_forward(key, mask, is_first=is_first)
        if is_first:
            out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scale)
        else:
            batch, num_heads, num_new, head_dim = query.shape
            out = torch.empty(batch, num_new, num_heads, head_dim, dtype=query.dtype)
        for place, sequence in enumerate(cache.sequences):
            first = cache.num_padding_tokens[place] if is_first else 0
            sequence.append(row, key[place, :, first:], value[place, :, first:])
            if is_first:
                sequence.score(row, query[place, :, first:], scale)
            else:
                sequence.attend(row, query[place], out[place].transpose(0, 1), scale)
        cache.end_row(row)
        return out

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return self._cache.max_tokens


class AttendCache(Cache):
    """Cache of a whole model: `AttendLayer` where attention is full, stock layers elsewhere.

    The prompt is computed with stock attention; so is every later forward over many tokens. A
    forward over one token attends, layer by layer, to the selected blocks, the newest whole block
    and the partial one. By default the prompt's newest queries score all blocks; then, every
    `reselect_every_tokens` tokens, those since the last selection do. Such a scored forward attends
    to everything. With `select_by="estimate"` every token selects, and nothing is scored.

    Left padding is not stored: it is never scored, selected or attended to. Beams, assisted
    decoding, crops and copies are refused; reuse by a later `generate()` that continues the same
    sequences works. While any such cache is open, the model's attention implementation is
    "blockcompact", which treats stock caches as the stock one does.

    Attributes:
        max_tokens: capacity of one sequence, padding included.
        sequences: the sequences of the batch; empty before the first forward.
        num_padding_tokens: left padding of each of them.
        close: gives the model its attention back and unregisters the stores, for good. The end of
            a `with` block or of the object does, too.
    """

    layers: list[Any]

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        budget: Budget | str,
        select_by: SelectionName = "attention",
        reselect_every_tokens: EveryTokens | None = None,
        max_mass_lost: float | None = None,
        decision_log: Path | str | None = None,
        block_tokens: int = 32,
        layout: LayoutName = "amx",
        attention: AttentionName = "blocks",
        max_tokens: int | None = None,
    ) -> None:
        """Prepares the model.

        Args:
            model: a decoder-only model with stock SDPA attention, on the CPU.
            budget: whole blocks that each layer of a sequence attends to, the first and the newest
                among them: a share ("25%") or a count ("32b").
            select_by: "attention" selects by measured attention mass, every so many tokens, in
                forwards that attend to everything. "estimate" selects anew for every decoded token,
                by what its query will attend to as a summary of the blocks' keys has it: no
                forward attends to everything.
            reselect_every_tokens: decoded tokens between two selections by "attention", 4 if not
                given. Fewer predict better; each costs one forward that attends to everything.
                "auto" chooses, of each sequence, the most tokens by which a selection's age loses
                at most `max_mass_lost`.
            max_mass_lost: share of attention mass that age may lose under "auto"; None for 0.01.
            decision_log: file that is begun anew, of every selection's decision.
            block_tokens: tokens a block.
            layout: packed layout; "amx" needs `block_tokens` and the head size to be multiples of
                32, "vec" takes any.
            attention: "blocks" attends in place; "gathered" unpacks the blocks for stock
                attention, slower and bit for bit the stock results at a budget of 100 %.
            max_tokens: capacity of one sequence; None for the positions that the model has.
                Memory is taken as it is written.

        Raises:
            OptionError: for a value that cannot be used.
            UnsupportedModelError: for an architecture, device or dtype that is not supported.
            UnsupportedLayoutError: if `layout` cannot hold the model's blocks.
        """
        parsed = parse_budget(budget) if isinstance(budget, str) else budget
        check_budget(parsed)
        every_tokens = period_of(select_by, reselect_every_tokens, max_mass_lost, decision_log)
        check_every_tokens(every_tokens, max_mass_lost)
        check_names(layout=layout, attention=attention)
        check_model(model)
        config = model.config.get_text_config(decoder=True)
        self.max_tokens = int(config.max_position_embeddings) if max_tokens is None else max_tokens
        check_counts(block_tokens=block_tokens, max_tokens=self.max_tokens)
        self._sizes = store_sizes(
            model,
            block_tokens=block_tokens,
            layout=Layout[layout.upper()],
            attention="blocks",  # scores read blocks in place either way
            max_tokens=self.max_tokens,
            num_draft_tokens=0,
        )
        self._model = model
        self._is_estimating = select_by == "estimate"
        self._new_period = partial(
            HoldingPeriod,
            every_tokens,
            first_tokens=FIRST_TOKENS,
            max_mass_lost=max_mass_lost,
            log=open_log(decision_log, engine="transformers", policy="attend", budget=str(parsed)),
        )
        self._is_gathering = attention == "gathered"
        self._selector = Selector(self._sizes.geometry, parsed, self._sizes.max_blocks)
        self._num_rows_attended, self._is_row_waiting = 0, False
        self.sequences: list[AttendSequence] = []
        self.num_padding_tokens: list[int] = []
        super().__init__(layers=self._new_layers(config))
        borrow_attention(model)
        self.close = weakref.finalize(self, _close, model, self.sequences)

    def _new_layers(self, config: Any) -> list[Any]:
        full_rows = iter(range(self._sizes.geometry.num_rows))
        return [
            AttendLayer(self, next(full_rows))
            if kind == "full_attention"
            else DynamicSlidingWindowLayer(sliding_window=config.sliding_window)
            for kind in layer_types(config)
        ]

    def check_forward(self, row: int, num_tokens: int) -> None:
        """Refuses keys of a row while another's wait to be attended to, or nobody attends.

        Args:
            row: full-attention layer row.
            num_tokens: its length with the new keys, padding included.
        """
        if not self.close.alive:
            raise ValueError("this cache is closed; make a new one")
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"{num_tokens} tokens do not fit; `max_tokens` is {self.max_tokens}. Give the "
                "cache more when making it."
            )
        name = self._model.config._attn_implementation
        if name != ATTENTION_NAME:
            raise ValueError(
                f"the model's attention implementation is {name!r}; expected '{ATTENTION_NAME}', "
                "which this cache set. Leave it as it is until the cache is closed."
            )
        if self._num_rows_attended == _FAILED:
            raise ValueError("an earlier forward with this cache failed; make a new cache")
        if self._is_row_waiting or self._num_rows_attended != row:
            raise UnsupportedModelError(
                f"full-attention layer {row} got keys when {self._num_rows_attended} had attended"
                f"{', and the keys before were not attended to' if self._is_row_waiting else ''}. "
                f"{type(self._model).__name__} does not hand a cache's keys to its attention as "
                "they are, or shares them between layers, or left a forward half done; such an "
                "architecture is not supported."
            )
        self._is_row_waiting = True

    def begin_forward(
        self, key: torch.Tensor, mask: torch.Tensor | None, *, is_first: bool
    ) -> None:
        """Starts a forward: finds the padding, and makes the stores at the first one.

        Args:
            key: new keys [batch, num_kv_heads, num_new, head_dim] of any layer.
            mask: bool [batch, 1, num_new, num_tokens] where the batch is padded, else None.
            is_first: whether the cache is empty.
        """
        self._num_rows_attended = _FAILED  # until the first row has attended
        batch, num_new = key.shape[0], key.shape[2]
        if key.requires_grad:
            raise ValueError("keys require gradients; run the model in `torch.inference_mode()`")
        padding = num_padding_tokens(mask, batch)
        if is_first:
            self._open_sequences(padding)
        elif batch != len(self.sequences):
            raise ValueError(
                f"the batch has {batch} rows; expected the {len(self.sequences)} of this cache"
            )
        elif padding != self.num_padding_tokens:
            raise ValueError(
                f"`attention_mask` leaves out {padding} tokens of the rows; expected the left "
                f"padding of the first forward, {self.num_padding_tokens}. Pass the mask of the "
                "whole sequence, with no padding after the prompt."
            )
        for sequence, num_skipped in zip(self.sequences, padding, strict=True):
            sequence.begin(num_new - (num_skipped if is_first else 0))

    def _open_sequences(self, padding: list[int]) -> None:
        self.num_padding_tokens = padding
        for place in range(len(padding)):
            sequence = AttendSequence(
                self._sizes,
                self._selector,
                period=self._new_period(),
                place=place,
                is_gathering=self._is_gathering,
                is_estimating=self._is_estimating,
            )
            self.sequences.append(sequence)

    def end_row(self, row: int) -> None:
        """Takes note that a row has attended; the last one ends the forward."""
        self._is_row_waiting = False
        self._num_rows_attended = row + 1
        if self._num_rows_attended == self._sizes.geometry.num_rows:
            for sequence in self.sequences:
                sequence.finish()
            self._num_rows_attended = 0

    def reset(self) -> None:
        """Forgets every token; the next forward may be of another batch."""
        super().reset()
        _close_sequences(self.sequences)
        self._num_rows_attended = 0
        self._is_row_waiting = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused."""
        raise NotImplementedError(_refusal("beam search", "decode with `num_beams=1`"))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused."""
        raise NotImplementedError(_refusal("taking tokens back", "call `reset()`"))

    def activate_past_recording(self) -> None:
        """Refused."""
        remedy = "pass no `assistant_model`; `lossless_generate` speculates by itself"
        raise NotImplementedError(_refusal("assisted decoding", remedy))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused."""
        raise NotImplementedError(_refusal("repeating rows", "repeat the prompts"))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused."""
        raise NotImplementedError(_refusal("selecting rows", "run the rows in a cache each"))

    def __deepcopy__(self, memo: Any) -> Self:
        raise NotImplementedError(_refusal("copying", "prefill a new cache"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refusal(what: str, remedy: str) -> str:
    return f"{what} is not supported with an AttendCache; {remedy}."


def _close(model: PreTrainedModel, sequences: list[AttendSequence]) -> None:
    return_attention(model)
    _close_sequences(sequences)


def _close_sequences(sequences: list[AttendSequence]) -> None:
    for sequence in sequences:
        sequence.close()
    sequences.clear()
