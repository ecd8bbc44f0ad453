"""The attend policy in a whole engine, against a model that knows every request by name."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels import Layout
from torch_bridge.budget import parse_budget
from torch_bridge.vllm import compaction as compaction_module
from torch_bridge.vllm.compaction import GroupCompaction
from torch_bridge.vllm.config import AttendConfig

from . import mini_engine as mini
from .mini_engine import MiniEngine, token_values
from .packed import attend


def make_engine(budget, every):
    geometry = ModelGeometry.uniform(
        num_layers=mini.LAYERS,
        num_query_heads=mini.HEADS * mini.GROUP,
        num_kv_heads=mini.HEADS,
        head_dim=mini.DIMS,
        block_tokens=mini.B,
        dtype="float32",
        layout="vec",
    )
    compaction = GroupCompaction(
        AttendConfig(budget=parse_budget(budget), reselect_every_tokens=every),
        geometry=geometry,
        layer_names=mini.LAYER_NAMES,
        layout=Layout.VEC,
        max_tokens=mini.MAX_BLOCKS * mini.B,
    )
    return MiniEngine(compaction)


class NamedRequest:
    """What the policy promises one request, from its name and its length."""

    def __init__(self, name, budget, every):
        self.name, self.budget, self.every = name, parse_budget(budget), every
        self.selected = None  # of each layer: a set of logical blocks
        self.num_candidates = self.selected_at = 0

    def decode(self, length):
        """(out of each layer, keys attended to, whether it is scored) of a step."""
        whole = length // mini.B
        budget = max(self.budget.num_blocks(whole), 2)
        is_scored = budget < whole and (
            self.selected is None or length - self.selected_at >= self.every
        )
        if budget >= whole:
            self.selected = None
        outs, masses = [], []
        num_keys = 0
        for layer in range(mini.LAYERS):
            tokens = [
                token
                for token in range(length)
                if is_scored
                or self.selected is None
                or token // mini.B in self.selected[layer]
                or token >= self.num_candidates * mini.B
            ]
            num_keys = len(tokens)
            drawn = [token_values(self.name, layer, token) for token in tokens]
            keys, values = (torch.stack([d[i] for d in drawn], 1).double() for i in (1, 2))
            query = token_values(self.name, layer, length - 1)[0]
            out, weights = attend(query, keys, values, mini.SCALE)
            outs.append(out)
            masses.append(weights.mean(0))
        if is_scored:
            self._select(length, budget, masses)
        return outs, num_keys, is_scored

    def _select(self, length, budget, masses):
        self.selected_at = length
        self.num_candidates = length // mini.B - 1
        self.selected = []
        for mass in masses:
            block_mass = [
                float(mass[b * mini.B : (b + 1) * mini.B].sum()) for b in range(self.num_candidates)
            ]
            ranked = sorted(range(1, self.num_candidates), key=lambda b: (-block_mass[b], b))
            self.selected.append(set([0, *ranked][: budget - 1]))


@settings(max_examples=12)
@given(
    data=st.data(),
    budget=st.sampled_from(["2b", "3b", "25%", "60%", "100%"]),
    every=st.sampled_from([1, 3, 7]),
)
def test_what_is_attended_is_exactly_the_selection_and_the_tail(data, budget, every):
    """Requests join, leave and reuse blocks; outputs, counted keys and scorings are as promised."""
    engine = make_engine(budget, every)
    known, num_keys, num_full_keys, num_scored = {}, 0, 0, 0
    num_names = 0
    for _ in range(data.draw(st.integers(5, 25))):
        for name in list(engine.names):
            if data.draw(st.integers(0, 11)) == 0:
                engine.leave(name)
        if len(engine.names) < mini.MAX_REQUESTS and data.draw(st.integers(0, 2)) == 0:
            num_names += 1
            engine.admit(num_names, data.draw(st.integers(1, 8 * mini.B)))
            known[num_names] = NamedRequest(num_names, budget, every)
        if not engine.names:
            continue
        outs = engine.step()
        for name, layers in outs.items():
            length = int(engine.seq_lens[engine.names.index(name)])
            expected, keys, is_scored = known[name].decode(length)
            for out, wanted in zip(layers, expected, strict=True):
                torch.testing.assert_close(out.double(), wanted, atol=3e-5, rtol=3e-5)
            num_keys += keys
            num_full_keys += length
            num_scored += is_scored
    counts = engine.compaction.counts
    assert counts.num_keys == num_keys
    assert counts.num_full_keys == num_full_keys
    assert counts.num_scored == num_scored


@pytest.mark.parametrize("every", [1, 4])
def test_a_request_is_scored_every_so_many_tokens(every):
    engine = make_engine("3b", every)
    engine.admit(1, 6 * mini.B + 3)
    scored = []
    for _ in range(14):
        before = engine.compaction.counts.num_scored
        engine.step()
        scored.append(engine.compaction.counts.num_scored - before)
    assert scored == [0] + [int(step % every == 0) for step in range(13)]


@pytest.mark.parametrize("num_prompt", [mini.B - 1, mini.B, mini.B + 1])
def test_a_budget_of_everything_never_compacts(num_prompt, monkeypatch):
    engine = make_engine("100%", 1)
    monkeypatch.setattr(
        compaction_module, "build_tables", lambda *_, **__: pytest.fail("tables were built")
    )
    engine.admit(1, num_prompt)
    for _ in range(2 * mini.B):
        engine.step()
    counts = engine.compaction.counts
    assert counts.num_keys == counts.num_full_keys > 0


def test_a_finished_request_leaves_nothing(monkeypatch):
    made = weakref.WeakSet()
    step_of = compaction_module.RequestTracker.step

    def remember(self, *args):
        rows = step_of(self, *args)
        made.update(row for row in rows if row is not None)
        return rows

    monkeypatch.setattr(compaction_module.RequestTracker, "step", remember)
    engine = make_engine("2b", 1)
    engine.admit(1, 5 * mini.B)
    engine.step()
    engine.step()
    assert len(made) == 1
    engine.leave(1)
    engine.admit(2, 3)
    engine.step()  # its scores, if it had any, are used up here; nothing of it is decoding
    gc.collect()
    assert not made
