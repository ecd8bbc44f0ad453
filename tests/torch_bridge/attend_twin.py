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


class EstimateTwin(AttendTwin):
    """Every token for itself, by means and variances of the keys of parts of blocks."""

    def __init__(self, *, part_tokens, **options):
        super().__init__(every_tokens=None, **options)
        self.part = part_tokens

    def _row(self, layer, row, qkv, scaling, window):
        self.given = (*qkv[:2], scaling)
        return super()._row(layer, row, qkv, scaling, window)

    def _attended(self, layer, row, num_queries, num_columns):
        query, key, scaling = self.given
        num_whole = (num_columns - self.padding[row]) // self.size
        budget = self._budget(num_columns - self.padding[row])
        if num_queries > 1 or budget >= num_whole:
            return torch.ones(num_columns, dtype=torch.bool)
        mass = self._estimated_mass(query[:, 0].double(), key[:, self.padding[row] :], scaling)
        per_block = self.size // self.part
        scores = [
            float(mass[:, b * per_block : (b + 1) * per_block].sum(1).mean())
            for b in range(num_whole - 1)
        ]
        ranked = sorted(range(1, num_whole - 1), key=lambda b: (-scores[b], b))
        position = torch.arange(num_columns) - self.padding[row]
        block = position.div(self.size, rounding_mode="floor")
        chosen = torch.tensor([0, *ranked[: budget - 2]])
        return torch.isin(block, chosen) | (block >= num_whole - 1)

    def _estimated_mass(self, query, key, scaling):
        logits = []
        for part in key.double().split(self.part, 1):
            variance = part.var(1, correction=0)
            mean_logit = scaling * (query * part.mean(1)).sum(-1)
            spread = scaling**2 / 2 * (query**2 * variance).sum(-1)
            logits.append(mean_logit + spread + math.log(part.shape[1]))
        return torch.stack(logits, 1).softmax(1)

    def _choose(self, layer, row, weights):
        pass
