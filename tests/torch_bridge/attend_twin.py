"""The attend policy written out: dense attention in float64 over what a stock cache holds."""

import math

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

MAX_SCORED_QUERIES = 16


class AttendTwin:
    """Attention function of one `generate()` call. Knows nothing but tensors and the budget."""

    def __init__(self, *, fraction, every_tokens, block_tokens, padding):
        self.fraction, self.every, self.size = fraction, every_tokens, block_tokens
        self.padding = padding
        self.newest = {}  # (layer, row) -> newest queries
        self.chosen = {}  # (layer, row) -> (selected blocks, candidate blocks, tokens then)
        self.num_keys = dict.fromkeys(range(len(padding)), 0)

    def register(self, name):
        AttentionInterface.register(name, self)
        AttentionMaskInterface.register(name, sdpa_mask)

    def __call__(self, module, query, key, value, mask, *, scaling, dropout=0.0, **kwargs):
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        rows = [
            self._row(module.layer_idx, row, qkv, scaling, kwargs.get("sliding_window"))
            for row, qkv in enumerate(zip(query, key, value, strict=True))
        ]
        return torch.stack(rows).transpose(1, 2).to(query.dtype).contiguous(), None

    def _row(self, layer, row, qkv, scaling, window):
        query, key, value = qkv
        num_queries, num_columns = query.shape[1], key.shape[1]
        # Where a sliding cache has dropped columns, columns no longer start at the padding.
        num_hidden = self.padding[row] if window is None else 0
        logits = scaling * query.double() @ key.double().transpose(1, 2)
        column = torch.arange(num_columns)
        own = torch.arange(num_columns - num_queries, num_columns)[:, None]
        visible = (column <= own) & (column >= num_hidden)
        if window is not None:
            visible &= column > own - window
            if any(self.padding):
                raise NotImplementedError("padding is tested on models without windows")
        else:
            visible &= self._attended(layer, row, num_queries, num_columns)
        weights = torch.softmax(logits.masked_fill(~visible, -math.inf), -1).nan_to_num()
        if window is None:
            num_tokens = num_columns - num_hidden
            before = self.newest.get((layer, row), query[:, :0])
            newest = torch.cat([before, query[:, -num_tokens:]], 1)[:, -MAX_SCORED_QUERIES:]
            self.newest[layer, row] = newest
            self._choose(layer, row, self._weights(newest, key[:, num_hidden:], scaling))
        return weights @ value.double()

    def _weights(self, query, key, scaling):
        logits = scaling * query.double() @ key.double().transpose(1, 2)
        own = torch.arange(key.shape[1] - query.shape[1], key.shape[1])[:, None]
        return torch.softmax(logits.masked_fill(torch.arange(key.shape[1]) > own, -math.inf), -1)

    def _attended(self, layer, row, num_queries, num_columns):
        num_tokens = num_columns - self.padding[row]
        block = (torch.arange(num_columns) - self.padding[row]).div(
            self.size, rounding_mode="floor"
        )
        known = self.chosen.get((layer, row))
        if self._budget(num_tokens) >= num_tokens // self.size:
            self.chosen.pop((layer, row), None)
            known = None
        self.is_scored = num_queries > 1 or known is None or num_tokens - known[2] >= self.every
        is_reselected = num_queries == 1 and known is not None
        self.num_scored_queries = num_tokens - known[2] if is_reselected else MAX_SCORED_QUERIES
        if self.is_scored:
            return torch.ones(num_columns, dtype=torch.bool)
        selected, num_candidates, _ = known
        return torch.isin(block, torch.tensor(selected)) | (block >= num_candidates)

    def _budget(self, num_tokens):
        return max(math.ceil(round(self.fraction * (num_tokens // self.size), 9)), 2)

    def _choose(self, layer, row, weights):
        num_tokens = weights.shape[2]
        budget, num_candidates = self._budget(num_tokens), num_tokens // self.size - 1
        if not self.is_scored or budget > num_candidates:
            return
        scored = weights[:, -self.num_scored_queries :].mean((0, 1))
        mass = [
            float(scored[b * self.size : (b + 1) * self.size].sum()) for b in range(num_candidates)
        ]
        ranked = sorted(range(1, num_candidates), key=lambda b: (-mass[b], b))
        self.chosen[layer, row] = ([0, *ranked[: budget - 2]], num_candidates, num_tokens)
