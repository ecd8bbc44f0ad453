"""An engine whose requests select by estimates, and what that promises each request."""

import torch

from blockcompact_jax.budget import parse_budget
from blockcompact_jax.kernels import Layout
from torch_bridge.vllm.config import AttendConfig
from torch_bridge.vllm.estimating import GroupEstimation

from . import mini_engine as mini
from .mini_engine import MiniEngine, token_values
from .packed import attend, estimated_mass


def make_engine(budget, every):
    compaction = GroupEstimation(
        AttendConfig(
            budget=parse_budget(budget), select_by="estimate", reselect_every_tokens=every
        ),
        geometry=mini.GEOMETRY,
        layer_names=mini.LAYER_NAMES,
        layout=Layout.VEC,
        max_tokens=mini.MAX_BLOCKS * mini.B,
    )
    return MiniEngine(compaction)


class NamedRequest:
    """What the policy promises one request, from its name and its length."""

    def __init__(self, name, budget):
        self.name, self.budget = name, parse_budget(budget)
        self.selected, self.num_candidates = None, 0

    def decode(self, length, *, is_turn):
        """(out of each layer, keys attended to, whether it selects) of a step."""
        whole = length // mini.B
        budget = max(self.budget.num_blocks(whole), 2)
        is_selecting = budget < whole and (is_turn or self.selected is None)
        if budget >= whole:
            self.selected = None
        if is_selecting:
            self.num_candidates = whole - 1
            self.selected = [self._select(layer, length, budget) for layer in range(mini.LAYERS)]
        outs, num_keys = [], 0
        for layer in range(mini.LAYERS):
            tokens = [
                token
                for token in range(length)
                if self.selected is None
                or token // mini.B in self.selected[layer]
                or token >= self.num_candidates * mini.B
            ]
            num_keys = len(tokens)
            query, keys, values = self._drawn(layer, length, tokens)
            outs.append(attend(query, keys, values, mini.SCALE)[0])
        return outs, num_keys, is_selecting

    def _select(self, layer, length, budget):
        query, keys, _ = self._drawn(layer, length, range(length))
        mass = estimated_mass(query, keys, self.num_candidates, mini.B, mini.SCALE)
        ranked = sorted(range(1, self.num_candidates), key=lambda b: (-float(mass[b]), b))
        return {0, *ranked[: budget - 2]}

    def _drawn(self, layer, length, tokens):
        drawn = [token_values(self.name, layer, token) for token in tokens]
        keys, values = (torch.stack([d[i] for d in drawn], 1).double() for i in (1, 2))
        return token_values(self.name, layer, length - 1)[0], keys, values
