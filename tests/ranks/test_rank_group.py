"""Rank processes: their bytes, their deaths, their silence. All are real processes."""

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.kernels import Layout
from blockcompact_jax.ledger import CommitLedger, Condition, LedgerError, LedgerShape, OperationKey
from blockcompact_jax.ranks.group import RankGroup, RankLostError, RankRefusedError
from blockcompact_jax.ranks.shares import share_heads

from .worlds import World, faulty, ranks_of, rows

pytestmark = pytest.mark.slow
MOVES = [(0, 1, 5), (0, 4, 0), (1, 3, 7), (1, 0, 2)]
KEY = OperationKey(
    process_epoch=1,
    request_id="r",
    request_epoch=1,
    operation_id=0,
    pool_generation=0,
    map_revision=0,
)


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


class OpenOperation:
    """A ledger with one issued operation; `landed` takes the ranks' words down in it."""

    def __init__(self, num_ranks):
        shape = LedgerShape(max_requests=1, max_operations=4, max_slots=2, num_ranks=num_ranks)
        self.ledger = ledger = CommitLedger(shape)
        self.heard = []
        ledger.admit("r")
        self.key = ledger.stage("r", ledger.revisions("r"), 0, body=b"x", num_slots=1).key
        ledger.reserve(self.key, num_slots=1)
        ledger.issue(self.key)

    def landed(self, rank, key):
        self.heard.append(rank)
        conditions = [Condition.READERS_DONE, Condition.LANDED]
        self.ledger.reach_all(key, ranks=[rank], conditions=conditions)

    def check_nothing_commits(self, rank):
        """The ledger itself refuses, and names the rank."""
        with pytest.raises(LedgerError) as caught:
            self.ledger.commit(self.key)
        assert (caught.value.code, caught.value.value) == (ResultCode.MISSING_READERS, rank)
        assert self.ledger.resident_slots("r") == []


def is_dead(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_UPL_6_every_rank_moves_its_heads(world, num_ranks):
    """UPL-6: all heads, exact bytes, nothing else; uneven shares too."""
    with ranks_of(world, num_ranks) as group:
        expected = np.zeros_like(world.resident)
        operation = OpenOperation(num_ranks)
        group.transfer(operation.key, rows(MOVES), operation.landed)
        for layer, source_block, physical_block in MOVES:
            expected[:, layer, :, physical_block] = world.block(layer, source_block)
        np.testing.assert_array_equal(world.resident, expected)
        assert sorted(operation.heard) == list(range(num_ranks))
        pids = group.pids
        assert len(set(pids.values())) == num_ranks
    assert all(is_dead(pid) for pid in pids.values())


def test_COM_7_a_commit_waits_for_the_last_rank(world):
    """COM-7, COM-1: one rank is stopped; until it has moved its bytes nothing is committed."""
    with ranks_of(world, 2) as group:
        operation = OpenOperation(2)
        late = group.pids[1]
        os.kill(late, signal.SIGSTOP)
        seen = []

        def wake():
            time.sleep(0.5)
            seen.append((list(operation.heard), world.resident[2].any()))
            os.kill(late, signal.SIGCONT)

        thread = threading.Thread(target=wake)
        thread.start()
        group.transfer(operation.key, rows(MOVES), operation.landed)
        thread.join()
        assert seen == [([0], False)]  # Rank 0 had landed; rank 1 had nothing.
        assert operation.heard == [0, 1]
        assert world.resident[2].any()


def test_COM_7_without_a_rank_nothing_commits(world):
    """COM-7, fault 13: the ledger itself refuses, and names what is missing."""
    with ranks_of(world, 2, patience_seconds=1.0) as group:
        operation = OpenOperation(2)
        pid = group.pids[0]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankLostError, match="Rank 0 died or did not answer"):
            group.transfer(operation.key, rows(MOVES), operation.landed)
        assert operation.heard == [1]
        assert is_dead(pid)  # Silent for too long: ended, so that nothing of it can land later.
        operation.check_nothing_commits(rank=0)


def test_COM_8_a_rank_killed_within_its_copy_is_replaced(world, tmp_path):
    """COM-8, UPL-4: kill -9 with half of the bytes there; the successor moves all again."""
    command = faulty(f"killed:{tmp_path / 'once'}")
    with ranks_of(world, 2, command=command) as group:
        operation = OpenOperation(2)
        with pytest.raises(RankLostError) as lost:
            group.transfer(operation.key, rows(MOVES), operation.landed)
        (dead,) = lost.value.ranks
        heads = [slice(0, 2), slice(2, 3)][dead]
        first, last = MOVES[0], MOVES[-1]
        assert world.resident[heads, first[0], :, first[2]].all()
        assert not world.resident[heads, last[0], :, last[2]].any()
        assert operation.heard == [1 - dead]
        operation.check_nothing_commits(rank=dead)
        group.replace_lost()
        assert group.num_replaced == 1
        assert not world.resident[heads].any()  # A new rank holds nothing.
        again = OpenOperation(2)
        group.transfer(again.key, rows(MOVES), again.landed)
        assert sorted(again.heard) == [0, 1]
        for layer, source_block, physical_block in MOVES:
            found = world.resident[:, layer, :, physical_block]
            np.testing.assert_array_equal(found, world.block(layer, source_block))


@pytest.mark.parametrize("place", [0, 1])
def test_COM_8_a_successor_that_dies_at_its_start_is_replaced_by_the_next_try(world, place):
    """COM-8: of two successors one does not start; the other must not be left without its pool."""
    with ranks_of(world, 3) as group:
        for rank in (0, 1):
            os.kill(group.pids[rank], signal.SIGKILL)
        operation = OpenOperation(3)
        with pytest.raises(RankLostError):
            group.transfer(operation.key, rows(MOVES), operation.landed)
        spawn, num_spawned = group._spawn, 0

        def spawn_one_that_ends():
            nonlocal num_spawned
            is_bad, command = num_spawned == place, group._command
            num_spawned += 1
            group._command = (sys.executable, "-c", "pass") if is_bad else command
            try:
                return spawn()
            finally:
                group._command = command

        group._spawn = spawn_one_that_ends
        with pytest.raises(RankLostError, match=f"Rank {place}"):
            group.replace_lost()
        assert group.num_replaced == 0
        group.replace_lost()
        assert group.num_replaced == 2
        again = OpenOperation(3)
        group.transfer(again.key, rows(MOVES), again.landed)
        assert sorted(again.heard) == [0, 1, 2]
        for layer, source_block, physical_block in MOVES:
            found = world.resident[:, layer, :, physical_block]
            np.testing.assert_array_equal(found, world.block(layer, source_block))


def test_COM_8_successors_without_a_source_are_started_again_with_the_next(world):
    """COM-8: the source is gone with its server; a later one is opened by new successors."""
    later = World(seed=2)
    with ranks_of(world, 2) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        operation = OpenOperation(2)
        with pytest.raises(RankLostError):
            group.transfer(operation.key, rows(MOVES), operation.landed)
        world.source.segment.close()
        with pytest.raises(RankRefusedError, match="memory cannot be opened"):
            group.replace_lost()
        assert sorted(group.pids) == [1]
        group.open_source(later.wires["source"], Layout.VEC)
        group.replace_lost()
        again = OpenOperation(2)
        group.transfer(again.key, rows(MOVES), again.landed)
        for layer, source_block, physical_block in MOVES:
            found = world.resident[:, layer, :, physical_block]
            np.testing.assert_array_equal(found, later.block(layer, source_block))
    later.close()


@pytest.mark.parametrize("fault", ["wordless", "garbled", "partial"])
def test_a_rank_without_a_sensible_answer_is_lost(world, fault):
    with ranks_of(world, 2, patience_seconds=1.0, command=faulty(fault)) as group:
        operation = OpenOperation(2)
        begin = time.monotonic()
        with pytest.raises(RankLostError) as lost:
            group.transfer(operation.key, rows(MOVES), operation.landed)
        assert time.monotonic() - begin < 20
        assert lost.value.ranks == (0, 1)
        assert operation.heard == []
        assert group.pids == {}


def test_COM_3_a_doubled_word_never_stands_in_for_another_rank(world):
    """COM-3, fault 13: every answer twice; the second of rank 0 is not the word of rank 1."""
    with ranks_of(world, 2, command=faulty("doubled")) as group:
        operation = OpenOperation(2)
        group.transfer(operation.key, rows(MOVES), operation.landed)
        ledger, key = operation.ledger, operation.key
        conditions = [Condition.TABLES_WRITTEN, Condition.COMPLETED]
        ledger.reach_all(key, ranks=[0, 1], conditions=conditions)
        ledger.commit(key)
        # The second words arrive during the next message, of an operation that has ended.
        ledger.acknowledge(key)
        group.transfer(operation.key, rows([]), operation.landed)
        assert set(operation.heard) == {0, 1}
        assert len(operation.heard) > 2
        assert len(ledger.resident_slots("r")) == 1


def test_an_operation_without_rows_waits_for_every_rank_too(world):
    """COM-2, fault 18: nothing to send; the ranks' words complete it."""
    with ranks_of(world, 2) as group:
        heard = []
        group.transfer(KEY, rows([]), lambda rank, key: heard.append((rank, key)))
        assert sorted(heard) == [(0, KEY), (1, KEY)]
        assert not world.resident.any()


def test_UPL_7_a_refusal_moves_nothing_and_loses_no_rank(world):
    """UPL-7: one bad row refuses the whole transfer; the ranks go on."""
    with ranks_of(world, 2) as group:
        pids = group.pids
        with pytest.raises(RankRefusedError, match=r"Rank 0: .*outside"):
            group.transfer(KEY, rows([*MOVES, (0, 0, 8)]), lambda rank, key: None)
        assert not world.resident.any()
        assert group.pids == pids


def test_ranks_end_with_their_engine(world):
    """COM-8: an engine that vanishes leaves no rank behind; here it only hangs up."""
    with ranks_of(world, 2) as group:
        members = dict(group._members)
        for member in members.values():
            member.connection.close()
        for member in members.values():
            assert member.process.wait(20) == 0


def test_a_rank_that_cannot_open_the_memory_says_why(world):
    group = RankGroup(share_heads(3, 2))
    pool = world.wires["pool"]
    gone = pool.model_copy(update={"segment": pool.segment.model_copy(update={"fd": 99_999})})
    try:
        with pytest.raises(RankRefusedError, match="memory cannot be opened"):
            group.open_pool(gone)
    finally:
        group.close()
