"""The attend policy in a whole engine, against a model that knows every request by name."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcompact_jax.budget import parse_budget
from blockcompact_jax.kernels import Layout
from torch_bridge.vllm import compaction as compaction_module
from torch_bridge.vllm import hosting
from torch_bridge.vllm.compaction import GroupCompaction
from torch_bridge.vllm.config import AttendConfig
from torch_bridge.vllm.host_blocks import HostBlocks, HostedBlocks
from torch_bridge.vllm.hosting import GroupHosting
from torch_bridge.vllm.requests import RetainedRequests

from . import mini_engine as mini
from .mini_engine import MiniEngine, token_values
from .packed import attend

ALL_BLOCKS = mini.MAX_REQUESTS * mini.MAX_BLOCKS


def make_engine(budget, every, policy="attend", num_host_blocks=ALL_BLOCKS):
    """Of the policies of `AttendConfig`; "host" is "retain" with host memory."""
    retained = RetainedRequests() if policy in {"retain", "host"} else None
    geometry = mini.GEOMETRY
    kind, more = GroupCompaction, {}
    if policy == "host":
        block_bytes = mini.LAYERS * geometry.block_bytes(0)
        kind, more = GroupHosting, {"host_bytes": (num_host_blocks + 1) * block_bytes - 1}
    name = "retain" if policy == "host" else policy
    compaction = kind(
        AttendConfig(policy=name, budget=parse_budget(budget), reselect_every_tokens=every),
        geometry=geometry,
        layer_names=mini.LAYER_NAMES,
        layout=Layout.VEC,
        max_tokens=mini.MAX_BLOCKS * mini.B,
        retained=retained,
        **more,
    )
    return MiniEngine(compaction, retained)


class NamedRequest:
    """What the policy promises one request, from its name and its length."""

    def __init__(self, name, budget, every, policy="attend"):
        self.is_retained, self.is_hosted = policy in {"retain", "host"}, policy == "host"
        self.name, self.budget, self.every = name, parse_budget(budget), every
        self.selected = None  # of each layer: a set of logical blocks
        self.num_candidates = self.reselect_at = self.length = 0
        self.has_given_back = False
        self.chosen = self.awaited = None  # (selected, num_candidates) on their way

    def decode(self, length):
        """(out of each layer, keys attended to, whether it is scored) of a step."""
        self._apply()
        whole = length // mini.B
        budget = max(self.budget.num_blocks(whole), 2)
        self.length = length
        self.has_given_back = self.is_retained and self.selected is not None
        can_select = budget < whole or (self.is_retained and self.selected is not None)
        is_scored = can_select and (self.selected is None or length >= self.reselect_at)
        is_scored = is_scored and self.awaited is None
        if budget >= whole and not self.is_retained:
            self.selected = None
        outs, masses = [], []
        num_keys = 0
        for layer in range(mini.LAYERS):
            tokens = self._tokens(layer, length)
            num_keys = len(tokens)
            outs.append(self._attend(layer, length, tokens)[0])
            if is_scored:  # over all tokens that are its own, whatever is attended to
                own = tokens if self.is_retained and not self.is_hosted else range(length)
                mass = torch.zeros(length, dtype=torch.float64)
                mass[list(own)] = self._attend(layer, length, own)[1].mean(0)
                masses.append(mass)
        if is_scored:
            self._select(length, budget, masses)
        return outs, num_keys, is_scored

    def go_on(self, length, count):
        """[layer][token] of a step with the `count` tokens up to `length`; without what is gone."""
        self.length = length
        if not self.has_given_back:  # it starts anew, with all its KV
            self.selected, self.reselect_at, self.chosen = None, 0, None
        self._apply()
        return [
            torch.stack(
                [
                    self._attend(layer, newest, self._tokens(layer, newest))[0]
                    for newest in range(length - count + 1, length + 1)
                ]
            )
            for layer in range(mini.LAYERS)
        ]

    def _apply(self):
        """With host memory: a choice holds in the next step, or once what must come back is there,
        in the step after it."""
        if self.awaited is not None:
            (self.selected, self.num_candidates), self.awaited = self.awaited, None
        if self.chosen is None:
            return
        chosen, self.chosen = self.chosen, None
        new = chosen[0][0] - (self.selected[0] if self.selected is not None else chosen[0][0])
        if any(block < self.num_candidates for block in new):
            self.awaited = chosen
        else:
            self.selected, self.num_candidates = chosen

    def _tokens(self, layer, length):
        return [
            token
            for token in range(length)
            if self.selected is None
            or token // mini.B in self.selected[layer]
            or token >= self.num_candidates * mini.B
        ]

    def schedule(self, others):
        """Is scored again as late as possible on a step with as few others as possible."""
        waits = [other.reselect_at - other.length for other in others if other.selected is not None]
        wait = min(range(1, self.every + 1), key=lambda w: (waits.count(w), -w))
        self.reselect_at = self.length + wait

    def _attend(self, layer, length, tokens):
        drawn = [token_values(self.name, layer, token) for token in tokens]
        keys, values = (torch.stack([d[i] for d in drawn], 1).double() for i in (1, 2))
        return attend(token_values(self.name, layer, length - 1)[0], keys, values, mini.SCALE)

    def _select(self, length, budget, masses):
        candidates = range(1, length // mini.B - 1)
        if self.is_retained:
            if self.selected is not None and not self.is_hosted:
                gone = set(range(self.num_candidates)) - self.selected[0]
                candidates = [block for block in candidates if block not in gone]
            masses = [torch.stack(masses).mean(0)] * mini.LAYERS
        num_candidates, selected = length // mini.B - 1, []
        for mass in masses:
            block_mass = [
                float(mass[b * mini.B : (b + 1) * mini.B].sum()) for b in range(num_candidates)
            ]
            ranked = sorted(candidates, key=lambda b: (-block_mass[b], b))
            selected.append(set([0, *ranked][: budget - 1]))
        if self.is_hosted:
            self.chosen = selected, num_candidates
        else:
            self.selected, self.num_candidates = selected, num_candidates


@settings(max_examples=12)
@given(
    data=st.data(),
    budget=st.sampled_from(["2b", "3b", "25%", "60%", "100%"]),
    every=st.sampled_from([1, 3, 7]),
    policy=st.sampled_from(["attend", "retain", "host"]),
)
def test_what_is_attended_is_exactly_the_selection_and_the_tail(data, budget, every, policy):
    """Requests join, leave and reuse blocks; outputs, counted keys and scorings are as promised."""
    engine = make_engine(budget, every, policy)
    known, num_keys, num_full_keys, num_scored = {}, 0, 0, 0
    num_names = 0
    for _ in range(data.draw(st.integers(5, 25))):
        for name in list(engine.names):
            if data.draw(st.integers(0, 11)) == 0:
                engine.leave(name)
        if len(engine.names) < mini.MAX_REQUESTS and data.draw(st.integers(0, 2)) == 0:
            num_names += 1
            engine.admit(num_names, data.draw(st.integers(1, 8 * mini.B)))
            known[num_names] = NamedRequest(num_names, budget, every, policy)
        if not engine.names:
            continue
        for place, name in enumerate(engine.names):
            room = mini.MAX_BLOCKS * mini.B - int(engine.seq_lens[place]) - 30
            if engine.seq_lens[place] and room > 1 and data.draw(st.integers(0, 7)) == 0:
                engine.go_on(name, data.draw(st.integers(2, min(room, 2 * mini.B))))
        going_on = dict(engine.num_next)
        outs, scored = engine.step(), []
        for name, layers in outs.items():
            length = int(engine.seq_lens[engine.names.index(name)])
            if name in going_on:
                expected = known[name].go_on(length, going_on[name])
                torch.testing.assert_close(
                    torch.stack(layers).double(), torch.stack(expected), atol=3e-5, rtol=3e-5
                )
                continue
            expected, keys, is_scored = known[name].decode(length)
            for out, wanted in zip(layers, expected, strict=True):
                torch.testing.assert_close(out.double(), wanted, atol=3e-5, rtol=3e-5)
            num_keys += keys
            num_full_keys += length
            num_scored += is_scored
            scored += [known[name]] if is_scored else []
        for request in scored:
            decoding = (known[name] for name in outs)
            request.schedule([other for other in decoding if other is not request])
    counts = engine.compaction.counts
    assert counts.num_keys == num_keys
    assert counts.num_full_keys == num_full_keys
    assert counts.num_scored == num_scored
    if policy == "host":
        assert engine.compaction.host.num_lost == 0


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


def test_OWN_1_what_is_not_retained_goes_back_and_is_reused():
    """OWN-1: many more requests decode at once than have room for their prompts."""
    engine = make_engine("25%", 4, "retain")
    for name in range(mini.MAX_REQUESTS):
        engine.admit(name, 10 * mini.B)
        for _ in range(3):  # prompt, scored, given back
            engine.step()
    engine.step()
    num_held = mini.NUM_BLOCKS - 1 - len(engine.free)
    assert num_held <= mini.MAX_REQUESTS * 5 < mini.MAX_REQUESTS * 10
    assert len(set(engine.free)) == len(engine.free), "nothing is freed twice"
    for name in range(mini.MAX_REQUESTS):
        engine.leave(name)
    assert sorted(engine.free) == list(range(1, mini.NUM_BLOCKS))


def hosting_request(num_host_blocks, budget="3b"):
    """An engine whose one request decoded for a while with another selection every few tokens."""
    engine = make_engine(budget, 2, "host", num_host_blocks)
    engine.admit(1, 6 * mini.B)
    for _ in range(5 * mini.B):
        engine.step()
    return engine


def test_OWN_1_blocks_on_the_host_come_back_into_blocks_of_the_engine():
    """OWN-1, UPL-6: what the engine has is the budget; what the request can choose, everything."""
    engine = hosting_request(num_host_blocks=12)
    host = engine.compaction.host
    assert mini.NUM_BLOCKS - 1 - len(engine.free) <= 3 + 2, "the budget, and what came since"
    assert host.num_uploaded > 2
    assert host.num_kept == 12 - host.num_free <= 10, "a block is copied to the host once"
    engine.leave(1)
    assert host.num_free == 12
    assert sorted(engine.free) == list(range(1, mini.NUM_BLOCKS))


def test_copies_of_what_the_engine_has_make_room_on_the_host():
    """A host that holds what the engine does not have loses nothing: copies are made again."""
    roomy = hosting_request(12, "5b")
    num_used = 12 - roomy.compaction.host.num_free
    tight = hosting_request(num_used - 1, "5b")
    host = tight.compaction.host
    assert host.num_lost == 0
    assert host.num_dropped > 0
    assert host.num_kept == num_used + host.num_dropped - host.num_free - 1
    ours, theirs = (e.retained.find(int(e.block_table[0, 0])) for e in (tight, roomy))
    assert ours.selected.tolist() == theirs.selected.tolist()


def test_what_the_host_has_no_room_for_is_gone_and_counted():
    engine = hosting_request(num_host_blocks=4)
    host = engine.compaction.host
    assert host.num_free == 0
    assert host.num_lost > 0
    hosted = engine.retained.find(int(engine.block_table[0, 0])).hosted
    assert len(hosted.host_block_of) == 4
    engine.leave(1)
    assert host.num_free == 4


def test_a_full_host_gives_up_what_is_attended_to_least():
    host = HostBlocks(layout=Layout.VEC, num_layer_rows=1, max_blocks=3)
    hosted = HostedBlocks(host)
    assert hosted.keep_best([4, 6], []) == [4, 6]
    assert hosted.keep_best([5, 4, 6], [9]) == [5]
    assert hosted.keep_best([7, 4, 6, 2], [5]) == [7], "5 can be copied again; 2 is the least"
    assert set(hosted.host_block_of) == {7, 4, 6}
    assert hosted.keep_best([3, 7, 4, 6], []) == [3], "6 lay on the host alone"
    assert set(hosted.host_block_of) == {3, 7, 4}
    assert (host.num_dropped, host.num_lost, host.num_free) == (1, 2, 0)
    hosted.release()
    assert host.num_free == 3


def test_host_memory_for_less_than_a_block_is_refused():
    with pytest.raises(ValueError, match=r"`host_bytes` is \d+ for 2 layers, expected at least"):
        make_engine("3b", 2, "host", num_host_blocks=0)


def test_a_host_block_is_freed_once():
    host = HostBlocks(layout=Layout.VEC, num_layer_rows=1, max_blocks=3)
    taken = host.take(5)
    assert sorted(taken) == [0, 1, 2]
    host.give_back(taken[:1])
    with pytest.raises(ValueError, match=f"`host_blocks` has {taken[0]}, which is free"):
        host.give_back(taken)


@pytest.mark.parametrize("every", [1, 3, 8])
def test_requests_that_start_together_are_scored_apart(every):
    """No step but the first scores more than its share, and no selection is older than `every`."""
    engine = make_engine("2b", every)
    for name in range(mini.MAX_REQUESTS):
        engine.admit(name, 4 * mini.B)
    scored = []
    for _ in range(2 + 3 * every):
        before = engine.compaction.counts.num_scored
        engine.step()
        scored.append(engine.compaction.counts.num_scored - before)
    assert scored[:2] == [0, mini.MAX_REQUESTS]
    assert max(scored[2:]) <= -(-mini.MAX_REQUESTS // every)
    for period in range(3):
        first = 2 + period * every
        assert sum(scored[first : first + every]) == mini.MAX_REQUESTS


@pytest.mark.parametrize("num_prompt", [mini.B - 1, mini.B, mini.B + 1])
def test_a_budget_of_everything_never_compacts(num_prompt, monkeypatch):
    engine = make_engine("100%", 1)
    monkeypatch.setattr(
        compaction_module.TableKeeper, "build", lambda *_, **__: pytest.fail("tables were built")
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


def test_host_memory_takes_the_difference_of_its_blocks_once(monkeypatch):
    """Not once a block: with thousands of blocks that is most of a step's time."""
    differences = []

    class CountingSet(set):
        def __sub__(self, other):
            differences.append(len(self))
            return super().__sub__(other)

    num_applied = 0
    apply = GroupHosting._apply

    def counted(self, *args):
        nonlocal num_applied
        num_applied += 1
        with monkeypatch.context() as patch:
            patch.setattr(hosting, "set", CountingSet, raising=False)
            apply(self, *args)

    monkeypatch.setattr(GroupHosting, "_apply", counted)
    engine = make_engine("3b", 4, policy="host")
    engine.admit(0, 60)
    for _ in range(12):
        engine.step()
    assert num_applied > 1
    assert len(differences) == 2 * num_applied, "what leaves and what arrives"
