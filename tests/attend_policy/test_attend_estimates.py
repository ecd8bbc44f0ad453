"""Selections by estimates: in a whole engine against every request by name, and their summaries."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels import Layout, build_info
from blockcompact_jax.kernels.native import load_native
from torch_bridge.vllm import key_summaries
from torch_bridge.vllm.estimating import SelectingRequests
from torch_bridge.vllm.key_summaries import KeySummaries
from torch_bridge.vllm.kv_blocks import KVBlocks, read_keys
from torch_bridge.vllm.requests import DecodingRequest
from torch_bridge.vllm.steps import StepTables

from . import mini_engine as mini
from .estimating_engine import NamedRequest, make_engine
from .packed import PackedKV, estimated_mass


@settings(max_examples=25)
@given(
    data=st.data(),
    budget=st.sampled_from(["2b", "3b", "25%", "60%", "100%"]),
    every=st.sampled_from([1, 2, 5]),
)
def test_every_layer_attends_to_what_its_own_query_was_estimated_to_attend_to(data, budget, every):
    """SEL-2, SEL-3: requests join, leave and reuse blocks; outputs and counted keys are as said."""
    engine = make_engine(budget, every)
    known, num_keys, num_selections, num_steps = {}, 0, 0, 0
    for _ in range(data.draw(st.integers(5, 25))):
        for name in list(engine.names):
            if data.draw(st.integers(0, 11)) == 0:
                engine.leave(name)
        if len(engine.names) < mini.MAX_REQUESTS and data.draw(st.integers(0, 2)) == 0:
            name = len(known) + 1
            engine.admit(name, data.draw(st.integers(1, 8 * mini.B)))
            known[name] = NamedRequest(name, budget)
        if not engine.names:
            continue
        for place, name in enumerate(engine.names):
            room = mini.MAX_BLOCKS * mini.B - int(engine.seq_lens[place]) - 30
            if engine.seq_lens[place] and room > 1 and data.draw(st.integers(0, 7)) == 0:
                engine.go_on(name, data.draw(st.integers(2, min(room, 2 * mini.B))))
        going_on, is_turn = dict(engine.num_next), num_steps % every == 0
        outs = engine.step()
        num_steps += 1
        for name, layers in outs.items():
            if name in going_on:  # all KV, and it starts anew
                known[name].selected = None
                continue
            length = int(engine.seq_lens[engine.names.index(name)])
            expected, keys, is_selecting = known[name].decode(length, is_turn=is_turn)
            for out, wanted in zip(layers, expected, strict=True):
                torch.testing.assert_close(out.double(), wanted, atol=3e-5, rtol=3e-5)
            num_keys += keys
            num_selections += is_selecting
    counts = engine.compaction.counts
    assert counts.num_keys == num_keys
    assert counts.num_scored == num_selections


def test_a_request_in_the_blocks_of_another_has_nothing_of_its_summaries():
    budget = "3b"
    engine = make_engine(budget, 1)
    engine.admit(1, 60)
    for _ in range(4):
        engine.step()
    before = set(engine.block_table[0, :8].tolist())
    engine.leave(1)
    engine.admit(2, 60)
    second = NamedRequest(2, budget)
    engine.step()
    assert before & set(engine.block_table[0, :8].tolist()), "blocks were not reused"
    for length in range(61, 64):
        (layers,) = engine.step().values()
        expected, _, is_selecting = second.decode(length, is_turn=True)
        assert is_selecting
        for out, wanted in zip(layers, expected, strict=True):
            torch.testing.assert_close(out.double(), wanted, atol=3e-5, rtol=3e-5)


def test_a_request_is_summarized_once_and_then_block_by_block(monkeypatch):
    added = []
    add = KeySummaries.add

    def counted(self, row, kv_cache, new):
        added.append((row, new.physical_blocks.numel()))
        add(self, row, kv_cache, new)

    monkeypatch.setattr(KeySummaries, "add", counted)
    engine = make_engine("3b", 1)
    engine.admit(1, 60)
    for _ in range(12):  # 60 to 71 tokens: 7 whole blocks at first, of which 6 are candidates
        engine.step()
    assert added == [(0, 6), (1, 6), (0, 1), (1, 1)]


PACKINGS = [("vec", Layout.VEC, torch.float32), ("amx", Layout.AMX, torch.bfloat16)]


@pytest.fixture(params=build_info()["simd_available"])
def forced_impl(request):
    load_native().force_impl(request.param)
    yield request.param
    load_native().force_impl("")


def filled_kv(packing, *, num_blocks, heads, dims):
    """(packed KV with random keys, [block, head, token, dim] of its keys)."""
    name, _, dtype = packing
    shape = {"num_blocks": num_blocks, "heads": heads, "block_tokens": 32, "dims": dims}
    kv = PackedKV(name, dtype=dtype, gap=64, **shape)
    keys = torch.randn(num_blocks, 32, heads, dims).to(dtype)
    for block, of_block in enumerate(keys):
        kv.clear(block)
        for offset, key in enumerate(of_block):
            kv.write(block, offset, key, key)
    return kv, keys.transpose(1, 2)


def geometry_of(packing, *, heads, group, dims):
    name, _, dtype = packing
    return ModelGeometry.uniform(
        num_layers=2,
        num_query_heads=heads * group,
        num_kv_heads=heads,
        head_dim=dims,
        block_tokens=32,
        dtype=str(dtype).removeprefix("torch."),
        layout=name,
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_keys_are_unpacked_as_they_are(packing):
    kv, keys = filled_kv(packing, num_blocks=5, heads=3, dims=64)
    blocks = torch.tensor([4, 0, 3])
    assert torch.equal(read_keys(kv.tensor, blocks, packing[1]), keys[blocks])


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("heads", "group", "dims"), [(3, 3, 64), (1, 2, 256)])
def test_what_is_chosen_has_the_largest_mass_written_out(forced_impl, packing, heads, group, dims):
    """SEL-2: many requests at once, of more blocks than an entry of the store has summaries; the
    later ones move the store; their queries lie apart and in another order."""
    torch.manual_seed(7)
    num_tokens, scale = (70 * 32 + 1, 4 * 32, 35 * 32 - 3, 64 * 32 + 31), dims**-0.5
    sizes = [-(-tokens // 32) for tokens in num_tokens]
    kv, keys = filled_kv(packing, num_blocks=sum(sizes), heads=heads, dims=dims)
    geometry = geometry_of(packing, heads=heads, group=group, dims=dims)
    summaries = KeySummaries(geometry, layout=packing[1])
    blocks = KVBlocks(layout=packing[1], num_layer_rows=2)
    tables = torch.randperm(sum(sizes)).int().split(sizes)
    requests = [
        DecodingRequest(
            physical_blocks=table.numpy(),
            num_tokens=tokens,
            num_candidate_blocks=tokens // 32 - 1,
            selected=np.zeros((2, count), np.int32),
        )
        for table, tokens, count in zip(tables, num_tokens, (9, 2, 9, 31), strict=True)
    ]
    query = torch.randn(7, heads * group, 3 * dims).to(packing[2])[..., dims : 2 * dims]
    first_query = torch.tensor([5, 0, 6, 2, 7])
    for known in (requests[1:2], requests):
        step = StepTables(
            block_table=np.full((2, len(known), 40), -5, np.int32),
            num_keys=np.zeros(len(known), np.int32),
        )
        selecting = SelectingRequests(
            dict(enumerate(known)),
            step,
            new_blocks=summaries.begin(known, [r.num_candidate_blocks for r in known]),
            summaries=summaries,
            blocks=blocks,
            geometry=geometry,
        )
        for row in range(2):
            selecting.select(row, kv.tensor, query=query, first_query=first_query, scale=scale)
    for place, (request, table) in enumerate(zip(requests, tables, strict=True)):
        of_request = keys[table].transpose(0, 1).flatten(1, 2)[:, : request.num_tokens]
        candidates, count = request.num_candidate_blocks, request.selected.shape[1]
        own_query = query[int(first_query[place])]
        mass = estimated_mass(own_query, of_request, candidates, 32, scale).numpy()
        for row in range(2):
            chosen = request.selected[row]
            assert chosen[0] == 0
            assert (np.diff(chosen) > 0).all()
            left = np.setdiff1d(np.arange(candidates), chosen)
            tolerance = 1e-4 if packing[2] == torch.float32 else 0.03
            assert mass[chosen[1:]].min() >= mass[left].max() * (1 - tolerance)
            assert (step.block_table[row, place, :count] == table.numpy()[chosen]).all()
            assert (step.block_table[row, place, count:] == -5).all()
    assert summaries.begin(requests, [r.num_candidate_blocks for r in requests]) is None


def test_requests_that_are_gone_leave_their_room_to_others():
    geometry = make_engine("3b", 1).compaction._geometry
    summaries = KeySummaries(geometry, layout=Layout.VEC)
    blocks = np.arange(3, dtype=np.int32)
    entries = set()
    for _ in range(5):
        requests = [DecodingRequest(physical_blocks=blocks, num_tokens=24) for _ in range(2)]
        summaries.keep(requests)
        summaries.begin(requests, [3, 3])
        entries |= {int(summaries.entries_of(request)[0]) for request in requests}
    assert entries == {0, 1}


def resident_bytes(summaries):
    """Of the store: pages that are in memory."""
    begin, size = summaries._keys.data_ptr(), len(summaries._memory)
    assert begin % mmap.PAGESIZE == 0
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(begin // mmap.PAGESIZE * 8)
        flags = np.frombuffer(pages.read(size // mmap.PAGESIZE * 8), np.uint64)
    return int((flags >> np.uint64(63)).sum()) * mmap.PAGESIZE


def test_memory_is_taken_for_the_blocks_that_requests_have_and_given_back(monkeypatch):
    """Requests of 32 and 96 blocks have one and three entries in a store of many more: their K
    halves, 48 KiB in each of two layers, are what memory is taken for."""
    monkeypatch.setattr(key_summaries, "_MIN_ENTRIES", 64)
    packing = ("vec", Layout.VEC, torch.float32)
    kv, _ = filled_kv(packing, num_blocks=96, heads=3, dims=64)
    summaries = KeySummaries(geometry_of(packing, heads=3, group=1, dims=64), layout=Layout.VEC)
    requests = [
        DecodingRequest(physical_blocks=np.arange(count, dtype=np.int32), num_tokens=count * 32)
        for count in (32, 96)
    ]
    new = summaries.begin(requests, [32, 96])
    for row in range(2):
        summaries.add(row, kv.tensor, new)
    entries = [summaries.entries_of(request).tolist() for request in requests]
    assert [len(own) for own in entries] == [1, 3]
    assert len({*entries[0], *entries[1]}) == 4
    assert resident_bytes(summaries) == 4 * 2 * 48 * 1024
    summaries.keep([])
    assert resident_bytes(summaries) == 0
