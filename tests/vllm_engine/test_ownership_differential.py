"""OWN: our ownership beside vLLM's BlockPool with its full and sliding-window managers.

One owner stands for vLLM's one pool, whose blocks any group may take. The two hand out free blocks
in different orders, so blocks are compared through the pairs that the same allocation gave.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blockcompact_jax.errors import ResultCode, raise_for_result
from blockcompact_jax.geometry import ModelGeometry, OwnershipGranularity, window_blocks
from blockcompact_jax.ids import HOLE
from blockcompact_jax.ownership import ReferenceKind, acquire, empty_ownership, release, reserve

B, WINDOW, NUM_BLOCKS, MAX_TOKENS = 4, 10, 24, 40
FULL, SLIDING = GROUPS = (0, 1)
SHAPE = {"num_query_heads": 1, "num_kv_heads": 1, "head_dim": 8}
STORE = {"block_tokens": B, "dtype": "float32", "layout": "vec"}
GEOMETRY = ModelGeometry.uniform(num_layers=1, **SHAPE, **STORE)
WINDOW_LAYER = ModelGeometry.uniform(
    num_layers=2, window_by_layer=[None, WINDOW], **SHAPE, **STORE
).layer_geometry(1)

jit_reserve = jax.jit(
    partial(reserve, geometry=GEOMETRY, max_reserve=NUM_BLOCKS, kind=ReferenceKind.REGULAR)
)
jit_acquire = jax.jit(partial(acquire, geometry=GEOMETRY), static_argnames="kind")
jit_release = jax.jit(partial(release, geometry=GEOMETRY), static_argnames="kind")


class Vllm:
    """vLLM's pool and managers; block 0 is its null block."""

    def __init__(self):
        import torch
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.single_type_kv_cache_manager import (
            FullAttentionManager,
            SlidingWindowManager,
        )
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        self.pool = BlockPool(NUM_BLOCKS + 1, enable_caching=True, hash_block_size=B)
        shape = {"block_size": B, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        common = {
            "block_pool": self.pool,
            "enable_caching": True,  # else managers refuse shared blocks
            "scheduler_block_size": B,
        }
        self.managers = (
            FullAttentionManager(FullAttentionSpec(**shape), kv_cache_group_id=FULL, **common),
            SlidingWindowManager(
                SlidingWindowSpec(**shape, sliding_window=WINDOW),
                kv_cache_group_id=SLIDING,
                **common,
            ),
        )

    @property
    def num_free(self):
        return self.pool.get_num_free_blocks()

    def table(self, request, group):
        return self.managers[group].req_to_blocks[request]


class Ours:
    """Reference counts of the same pool, by our functions only."""

    def __init__(self):
        self.ownership = empty_ownership(
            GEOMETRY, granularity=OwnershipGranularity.GROUP, num_physical_blocks=NUM_BLOCKS
        )

    @property
    def num_free(self):
        return int(np.asarray(self.ownership.is_free).sum())

    def num_references(self, block):
        return int(np.asarray(self.ownership.references)[:, 0, block].sum())

    def reserve(self, num_blocks):
        """New blocks, or None and nothing changed where the pool has too few."""
        after, blocks, result = jit_reserve(self.ownership, np.array([num_blocks], np.int32))
        if int(result.code) == ResultCode.POOL_EXHAUSTED:
            return None
        raise_for_result(result)
        self.ownership = after
        return np.asarray(blocks)[0, :num_blocks].tolist()

    def acquire(self, blocks, kind):
        after, result = jit_acquire(self.ownership, self._row(blocks), kind=kind)
        self.ownership = after
        return int(result.code)

    def release(self, blocks, kind):
        after, _, result = jit_release(self.ownership, self._row(blocks), kind=kind)
        self.ownership = after
        return int(result.code)

    @staticmethod
    def _row(blocks):
        row = np.full((1, NUM_BLOCKS), HOLE, np.int32)
        row[0, : len(blocks)] = blocks
        return row


@dataclass
class Sequence:
    """What the test itself knows of a request: (our block, kind) or None, by group and place."""

    num_tokens: int = 0
    tables: tuple[list, list] = field(default_factory=lambda: ([], []))


class Differential(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.vllm, self.ours = Vllm(), Ours()
        self.sequences = {}
        self.num_started = 0

    @rule(num_tokens=st.integers(1, MAX_TOKENS), wanted=st.integers(0, 10), data=st.data())
    def start(self, num_tokens, wanted, data):
        """A request, behind the prefix of another where there is one."""
        name = f"request {self.num_started}"
        self.num_started += 1
        sequence = Sequence()
        if self.sequences:
            donor_name = data.draw(st.sampled_from(sorted(self.sequences)))
            self._share(donor_name, name, sequence, min(wanted, (num_tokens - 1) // B))
        self.sequences[name] = sequence
        self._grow(name, num_tokens)

    def _share(self, donor_name, name, sequence, wanted):
        donor = self.sequences[donor_name]
        num_shared = next(
            n
            for n in range(min(wanted, donor.num_tokens // B), -1, -1)
            if all(donor.tables[SLIDING][i] for i in window_blocks(WINDOW_LAYER, n * B, B))
        )
        for group, manager in enumerate(self.vllm.managers):
            blocks = self.vllm.table(donor_name, group)[:num_shared]
            manager.add_local_computed_blocks(name, blocks, num_shared * B, 0)
            needed = range(num_shared)
            if group == SLIDING:
                needed = window_blocks(WINDOW_LAYER, num_shared * B, B)
            table = [
                (donor.tables[group][i][0], ReferenceKind.PREFIX) if i in needed else None
                for i in range(num_shared)
            ]
            assert not self.ours.acquire([e[0] for e in table if e], ReferenceKind.PREFIX)
            sequence.tables[group].extend(table)
        sequence.num_tokens = num_shared * B

    @precondition(lambda self: self.sequences)
    @rule(num_new_tokens=st.integers(1, 9), data=st.data())
    def grow(self, num_new_tokens, data):
        """A step of a request: blocks behind the window go first, then new ones come."""
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        sequence = self.sequences[name]
        self.vllm.managers[SLIDING].remove_skipped_blocks(name, sequence.num_tokens)
        table = sequence.tables[SLIDING]
        first = window_blocks(WINDOW_LAYER, sequence.num_tokens, B).start
        self._release([entry for entry in table[:first] if entry])
        table[:first] = [None] * first
        self._grow(name, min(sequence.num_tokens + num_new_tokens, MAX_TOKENS))

    def _grow(self, name, num_tokens):
        sequence = self.sequences[name]
        num_new = [-(-num_tokens // B) - len(table) for table in sequence.tables]
        if sum(num_new) > self.ours.num_free:
            with pytest.raises(ValueError, match="Cannot get"):
                self.vllm.pool.get_new_blocks(sum(num_new))
            assert self.ours.reserve(sum(num_new)) is None
            self._finish(name)
            return
        for group, manager in enumerate(self.vllm.managers):
            manager.allocate_new_blocks(name, num_tokens, num_tokens)
            blocks = self.ours.reserve(num_new[group])
            assert blocks is not None
            sequence.tables[group].extend((block, ReferenceKind.REGULAR) for block in blocks)
        sequence.num_tokens = num_tokens

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data):
        self._finish(data.draw(st.sampled_from(sorted(self.sequences))))

    def _finish(self, name):
        for manager in self.vllm.managers:
            manager.free(name)
        for table in self.sequences.pop(name).tables:
            self._release([entry for entry in table if entry])

    def _release(self, entries):
        for kind in (ReferenceKind.REGULAR, ReferenceKind.PREFIX):
            assert not self.ours.release([b for b, k in entries if k is kind], kind)

    @invariant()
    def the_same_blocks_are_free_and_referenced_as_often(self):
        assert self.ours.num_free == self.vllm.num_free
        ours_by_vllm = {}
        for name, sequence in self.sequences.items():
            for group in GROUPS:
                theirs = self.vllm.table(name, group)
                assert [b.is_null for b in theirs] == [e is None for e in sequence.tables[group]]
                for block, entry in zip(theirs, sequence.tables[group], strict=True):
                    if entry:
                        assert ours_by_vllm.setdefault(block.block_id, entry[0]) == entry[0]
                        assert self.ours.num_references(entry[0]) == block.ref_cnt
        assert len(set(ours_by_vllm.values())) == len(ours_by_vllm)
        assert len(ours_by_vllm) == NUM_BLOCKS - self.ours.num_free


def test_OWN_1_OWN_2_random_requests_against_vllm():
    """OWN-1, OWN-2: free counts, tables and reference counts equal vLLM's after every operation."""
    pytest.importorskip("vllm")
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Differential, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


@pytest.fixture
def both():
    pytest.importorskip("vllm")
    return Vllm(), Ours()


def test_OWN_5_by_design_a_double_free_is_an_error_here_and_goes_unnoticed_in_vllm(both):
    """OWN-5: vLLM's count turns negative without a word; the next to get the block trips on it."""
    vllm, ours = both
    (theirs,) = vllm.pool.get_new_blocks(1)
    vllm.pool.free_blocks([theirs])
    vllm.pool.free_blocks([theirs])
    assert theirs.ref_cnt == -1
    assert vllm.num_free == NUM_BLOCKS
    with pytest.raises(AssertionError):
        vllm.pool.get_new_blocks(NUM_BLOCKS)

    blocks = ours.reserve(1)
    assert ours.release(blocks, ReferenceKind.REGULAR) == ResultCode.OK
    assert ours.release(blocks, ReferenceKind.REGULAR) == ResultCode.DOUBLE_RELEASE
    assert ours.num_references(blocks[0]) == 0
    assert len(ours.reserve(NUM_BLOCKS)) == NUM_BLOCKS


def test_OWN_5_by_design_a_double_free_takes_no_sharers_reference_here_and_does_in_vllm(both):
    """OWN-2, OWN-5: vLLM then hands out a block that another request still reads."""
    vllm, ours = both
    (theirs,) = vllm.pool.get_new_blocks(1)
    vllm.pool.touch([theirs])  # a second request reads it
    vllm.pool.free_blocks([theirs])
    vllm.pool.free_blocks([theirs])  # the first one again
    assert vllm.num_free == NUM_BLOCKS

    blocks = ours.reserve(1)
    assert ours.acquire(blocks, ReferenceKind.PREFIX) == ResultCode.OK
    assert ours.release(blocks, ReferenceKind.REGULAR) == ResultCode.OK
    assert ours.release(blocks, ReferenceKind.REGULAR) == ResultCode.DOUBLE_RELEASE
    assert ours.num_references(blocks[0]) == 1
    assert ours.num_free == NUM_BLOCKS - 1


def test_OWN_5_by_design_a_block_twice_in_one_call_is_refused_whole_here(both):
    """OWN-5: vLLM takes both references; ours takes none, not even those of other blocks."""
    vllm, ours = both
    theirs = vllm.pool.get_new_blocks(2)
    vllm.pool.free_blocks([theirs[0], theirs[1], theirs[1]])
    assert [block.ref_cnt for block in theirs] == [0, -1]

    first, second = ours.reserve(2)
    listed = [first, second, second]
    assert ours.release(listed, ReferenceKind.REGULAR) == ResultCode.DOUBLE_RELEASE
    assert [ours.num_references(block) for block in (first, second)] == [1, 1]


def test_OWN_5_by_design_a_freed_block_is_not_shared_here_and_may_be_in_vllm(both):
    """OWN-5: vLLM's prefix cache revives free blocks; one of ours would hold a reference."""
    vllm, ours = both
    (theirs,) = vllm.pool.get_new_blocks(1)
    vllm.pool.free_blocks([theirs])
    vllm.pool.touch([theirs])
    assert (theirs.ref_cnt, vllm.num_free) == (1, NUM_BLOCKS - 1)

    blocks = ours.reserve(1)
    assert ours.release(blocks, ReferenceKind.REGULAR) == ResultCode.OK
    assert ours.acquire(blocks, ReferenceKind.PREFIX) == ResultCode.NOT_OWNED
    assert ours.num_free == NUM_BLOCKS
    assert ours.acquire(blocks, ReferenceKind.REGULAR) == ResultCode.OK  # as a new allocation
