"""Selections by estimates that cannot be made: what is refused, and what a broken step leaves."""

import math

import numpy as np
import pytest
import torch

from blockcompact_jax.errors import PlanError
from torch_bridge.vllm import estimating
from torch_bridge.vllm.estimating import SelectingRequests

from . import mini_engine as mini
from .estimating_engine import NamedRequest, make_engine


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("block", [5, 7])
def test_a_mass_that_is_not_finite_names_layer_and_block(block, value):
    """SEL-4: a candidate, and a block behind the candidates, whose keys are scored exactly."""
    engine = make_engine("3b", 1)
    engine.admit(1, 63)
    engine.step()
    for kv in engine.kv[1:]:
        kv.tensor[int(engine.block_table[0, block])] = value
    with pytest.raises(PlanError, match=rf"block {block} in layer 1\b"):
        engine.step()


class BrokenForwardError(Exception):
    """Ends a step between two layers."""


def end_by_fault(engine, monkeypatch):
    """A key of layer 1 is not finite."""
    tensor = engine.kv[1].tensor
    block, before = int(engine.block_table[0, 5]), tensor.clone()
    tensor[block] = math.nan
    with pytest.raises(PlanError):
        engine.step()
    tensor.copy_(before)


def end_in_forward(engine, monkeypatch):
    """The engine's own kernel fails in layer 0, so that layer 1 never selects."""

    def fail(*args):
        raise BrokenForwardError

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_attend", fail)
        with pytest.raises(BrokenForwardError):
            engine.step()


@pytest.mark.parametrize("end_step", [end_by_fault, end_in_forward])
def test_a_step_that_broke_leaves_no_selection_and_no_summaries(monkeypatch, end_step):
    """SEL-2, SEL-4: all requests of the step select anew in the next one, which is no turn."""
    engine = make_engine("3b", 100)
    for name in (1, 2):
        engine.admit(name, 60)
    engine.step()
    end_step(engine, monkeypatch)
    for place in range(2):
        engine._write(1, place, 60)  # what the step did not come to
    outs = engine.step()
    for name, layers in outs.items():
        expected, _, is_selecting = NamedRequest(name, "3b").decode(62, is_turn=False)
        assert is_selecting
        for out, wanted in zip(layers, expected, strict=True):
            torch.testing.assert_close(out.double(), wanted, atol=3e-5, rtol=3e-5)


def test_a_fault_leaves_all_selections_of_the_layer_unwritten():
    """SEL-4: also those of the requests without a fault."""
    engine = make_engine("3b", 100)
    for name in (1, 2):
        engine.admit(name, 60)
    engine.step()
    engine.kv[0].tensor[int(engine.block_table[1, 5])] = math.nan
    selected = []
    begin = engine.compaction._begin_selection

    def kept(request):
        begin(request)
        selected.append(request.selected)

    engine.compaction._begin_selection = kept
    with pytest.raises(PlanError):
        engine.step()
    assert len(selected) == 2
    assert not any(array.any() for array in selected)
    assert all(request.selected is None for request in engine.compaction._selecting.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda query: query.half(), "dtype torch.float16"),
        (lambda query: query.repeat_interleave(2, 2)[..., ::2], "contiguous last axis"),
    ],
)
def test_queries_that_cannot_be_read_in_place_are_refused(monkeypatch, change, message):
    engine = make_engine("3b", 1)
    engine.admit(1, 60)
    engine.step()
    select = SelectingRequests.select
    monkeypatch.setattr(
        SelectingRequests,
        "select",
        lambda self, *args, query, **facts: select(self, *args, query=change(query), **facts),
    )
    with pytest.raises(ValueError, match=rf"`query`.*{message}"):
        engine.step()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_chosen": -3}, "`num_chosen` is -3"),
        ({"num_chosen": 0}, "`num_chosen` is 0"),
        ({"num_chosen": 7}, "`num_chosen` is 7"),
        ({"num_sinks": -4}, "`num_sinks` is -4"),
        ({"exact_table": np.zeros(0, np.int32), "num_exact_keys": 0}, "`exact_table.size` is 0"),
        ({"num_exact_keys": 0}, "`num_exact_keys` is 0"),
        ({"num_exact_keys": mini.B}, "`num_exact_keys` is 8"),
        ({"physical_blocks": np.arange(5, dtype=np.int32)}, "`physical_blocks.size` is 5"),
        ({"physical_blocks": np.full(8, -1, np.int32)}, r"`physical_blocks\[0\]` is -1"),
        ({"physical_blocks": np.full(8, 40, np.int32)}, r"`physical_blocks\[0\]` is 40"),
    ],
)
def test_counts_and_blocks_that_do_not_fit_are_refused_by_name(monkeypatch, changes, message):
    engine = make_engine("3b", 1)
    engine.admit(1, 60)
    engine.step()
    choose = estimating.host_pool_choose_by_estimate_at

    def changed(moments, keys, sequences, **facts):
        of_sequence = {name: value for name, value in changes.items() if name != "num_sinks"}
        facts["num_sinks"] = changes.get("num_sinks", facts["num_sinks"])
        sequences = [sequence._replace(**of_sequence) for sequence in sequences]
        return choose(moments, keys, sequences, **facts)

    monkeypatch.setattr(estimating, "host_pool_choose_by_estimate_at", changed)
    with pytest.raises(ValueError, match=message):
        engine.step()
