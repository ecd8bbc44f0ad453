"""A remote session whose uploads run in rank processes: the same tokens, whatever dies."""

import gc
import os
import signal
from contextlib import suppress

import pytest
import torch

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.remote.client import RemoteClient
from blockcompact_jax.remote.errors import RemoteRefusedError, ServerLostError
from blockcompact_jax.remote.segment import MemoryAllowance, SharedSegment
from torch_bridge.huggingface.ranks import ResidentRanks
from torch_bridge.huggingface.remote import RemoteSession
from torch_bridge.huggingface.sizes import StoreSizes
from torch_bridge.pools import KVShape

from .test_remote_session import (
    any_violation,
    client_of,
    context,  # noqa: F401  # a fixture
    decode,
    local,
    sides,
)
from .tiny import TOKEN, serving, start, tiny_model

pytestmark = pytest.mark.slow


def children_of(pid):
    """Process IDs whose parent is `pid`."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def own_segments():
    """Segments that this process has open, or whose pages something in it still uses."""
    gc.collect()
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(link for link in links if "blockcompact-" in link)


def _fail(*_):
    raise MemoryError("no room")


def session_of(model, server, *, num_ranks=2):
    return RemoteSession(**sides(model), client=client_of(server), num_ranks=num_ranks)


@pytest.mark.parametrize(("family", "num_ranks"), [("llama", 2), ("uneven", 2), ("gemma", 2)])
def test_COM_1_ranks_give_the_local_run(family, num_ranks, context):  # noqa: F811
    """COM-1, CMP-1: equal tokens, rounds and acceptance; even and uneven shares, hybrid models."""
    model = tiny_model(family)
    expected = local(model, context)
    with serving(family) as server:
        with session_of(model, server, num_ranks=num_ranks) as session:
            pids = session.ranks.group.pids
            found = decode(session, context)
            ledger = session.verifier.transfers.ledger
            assert ledger.shape.num_ranks == num_ranks
            assert not any_violation(ledger.state)
            assert session.runtime.num_selections > 3
            assert session.runtime.metrics.cpu_gather_bytes == 0
            assert session.ranks.group.num_replaced == 0
        assert found == expected
        assert server.segments() == []
        assert not set(pids.values()) & set(children_of(os.getpid()))


def test_COM_8_a_killed_rank_is_replaced_and_all_is_moved_again(context):  # noqa: F811
    """COM-8: kill -9 between rounds; what it held is gone, so a full plan follows; same tokens."""
    model = tiny_model("uneven")
    expected = local(model, context)
    with serving("uneven") as server, session_of(model, server) as session:
        heard = []

        def kill_once(tokens):
            heard.extend(tokens)
            if len(heard) > 20 and not killed:
                killed.append(session.ranks.group.pids[1])
                os.kill(killed[0], signal.SIGKILL)

        killed = []
        found = decode(session, context, on_tokens=kill_once)
        assert session.ranks.group.num_replaced == 1
        assert session.num_recoveries == 0  # The server was never lost.
        assert found.tokens == expected.tokens
        ledger = session.verifier.transfers.ledger
        assert not any_violation(ledger.state)
        assert len(ledger.resident_slots(session.verifier._request_id)) == 1


def test_COM_8_a_rank_and_the_server_die_in_one_round(context):  # noqa: F811
    """COM-8, CAP-4: both are replaced; the same tokens."""
    model = tiny_model("llama")
    expected = local(model, context)
    servers = [start("llama")]
    port = int(servers[0].url.rsplit(":", 1)[1])
    try:
        with session_of(model, servers[0]) as session:
            heard = []

            def kill_once(tokens):
                heard.extend(tokens)
                if len(servers) == 1 and len(heard) > 20:
                    os.kill(session.ranks.group.pids[0], signal.SIGKILL)
                    servers[0].kill()
                    servers.append(start("llama", port=port))

            found = decode(session, context, on_tokens=kill_once)
            assert session.ranks.group.num_replaced == 1
            assert session.num_recoveries == 1
            assert not any_violation(session.verifier.transfers.ledger.state)
        assert found.tokens == expected.tokens
        assert servers[1].segments() == []
    finally:
        for server in servers:
            server.kill()


@pytest.mark.parametrize("moment", ["before_the_replacement", "after_the_replacement"])
def test_COM_8_the_server_dies_while_a_rank_is_replaced(moment, context):  # noqa: F811
    """COM-8, CAP-4: a successor finds the old memory gone, or its first transfer nobody there."""
    model = tiny_model("llama")
    expected = local(model, context)
    servers = [start("llama")]
    port = int(servers[0].url.rsplit(":", 1)[1])

    def restart_server():
        if len(servers) == 1:
            servers[0].kill()
            servers.append(start("llama", port=port))

    try:
        with session_of(model, servers[0]) as session:
            group, transfers = session.ranks.group, []
            transfer, replace_lost = group.transfer, group.replace_lost

            def transfer_with_a_killed_rank(*arguments):
                transfers.append(arguments)
                if len(transfers) == 3:
                    os.kill(group.pids[0], signal.SIGKILL)
                transfer(*arguments)

            def replace_around_a_restart():
                if moment == "before_the_replacement":
                    restart_server()
                replace_lost()
                restart_server()

            group.transfer = transfer_with_a_killed_rank
            group.replace_lost = replace_around_a_restart
            found = decode(session, context)
            assert len(servers) == 2
            assert session.num_recoveries == 1
            assert group.num_replaced == 1
            assert not any_violation(session.verifier.transfers.ledger.state)
        assert found.tokens == expected.tokens
        assert servers[1].segments() == []
    finally:
        for server in servers:
            server.kill()


def test_more_ranks_than_heads_and_a_wrong_server_leave_no_process(context):  # noqa: F811
    """CAP-2: nothing starts, and no rank is left."""
    before = set(children_of(os.getpid()))
    with serving("llama") as server:
        with pytest.raises(CompactionError, match="`ranks` is 3 for 2 KV heads"):
            session_of(tiny_model("llama"), server, num_ranks=3)
        with pytest.raises(RemoteRefusedError, match="`model`"):
            session_of(tiny_model("uneven"), server)
    assert set(children_of(os.getpid())) <= before


@pytest.mark.parametrize("failing", ["full_kv", "block_attention"])
def test_COM_8_a_session_that_cannot_be_made_leaves_no_rank_and_no_memory(failing, monkeypatch):
    """COM-8: whatever fails in the constructor, what it started is ended before it raises."""
    monkeypatch.setattr(StoreSizes, failing, _fail)
    ranks, segments = set(children_of(os.getpid())), own_segments()
    model = tiny_model("llama")
    client = RemoteClient("http://127.0.0.1:9", token=TOKEN, retry_seconds=0.1)
    with pytest.raises(MemoryError, match="no room") as caught:
        RemoteSession(**sides(model), client=client, num_ranks=2)
    assert set(children_of(os.getpid())) <= ranks  # At once, not when it is collected.
    del caught
    assert own_segments() == segments
    assert model.config._attn_implementation == "sdpa"


def test_COM_8_a_session_without_a_server_leaves_no_rank_and_no_memory():
    """COM-8: the handshake fails last; ranks, memory and attention are given back."""
    ranks, segments = set(children_of(os.getpid())), own_segments()
    model = tiny_model("llama")
    client = RemoteClient("http://127.0.0.1:9", token=TOKEN, retry_seconds=0.1)
    with pytest.raises(ServerLostError):
        RemoteSession(**sides(model), client=client, num_ranks=2)
    assert set(children_of(os.getpid())) <= ranks
    assert own_segments() == segments
    assert model.config._attn_implementation == "sdpa"


def test_COM_8_a_pool_that_cannot_be_made_leaves_no_memory(monkeypatch):
    """COM-8: the ranks' memory is let go of where the pool fails before any rank has started."""
    monkeypatch.setattr(KVShape, "register_plain", _fail)
    segments = own_segments()
    shape = KVShape(num_rows=1, num_kv_heads=2, block_tokens=32, head_dim=32, dtype=torch.float32)
    ranks = ResidentRanks(shape, 2)
    with pytest.raises(MemoryError, match="no room"):
        ranks.start(4)
    assert own_segments() == segments
    assert ranks.group.pids == {}


def test_COM_8_a_forgotten_segment_is_closed():
    segments = own_segments()
    segment = SharedSegment(MemoryAllowance(1 << 20))
    assert len(own_segments()) == len(segments) + 1
    del segment
    gc.collect()
    assert own_segments() == segments
