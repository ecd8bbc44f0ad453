"""Real server processes: the same tokens, recovery, nothing leaked."""

import time

import pytest
import torch

from blockcompact_jax.budget import Budget
from blockcompact_jax.kernels import Layout
from blockcompact_jax.kernels.pools import PoolClosedError
from blockcompact_jax.ledger.invariants import find_violations
from blockcompact_jax.remote.client import RemoteClient
from blockcompact_jax.remote.errors import (
    Refusal,
    RemoteRefusedError,
    SegmentError,
    ServerLostError,
)
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.remote import RemoteSession
from torch_bridge.huggingface.sampling import Sampler
from torch_bridge.huggingface.session import CompactionSession, SessionLimits
from torch_bridge.huggingface.speculate import decode_speculative
from torch_bridge.tables import TablesBusyError

from .proxy import faulty_proxy
from .tiny import TOKEN, serving, start, tiny_model

NUM_NEW = 60


def any_violation(state):
    return [name for name, lanes in find_violations(state).items() if lanes.any()]


def sides(model, *, block_tokens=32):
    return {
        "model": model,
        "limits": SessionLimits(
            max_tokens=400,
            num_draft_tokens=3,
            num_lookup_tokens=2,
            reselect_every_rounds=2,
            block_tokens=block_tokens,
            budget=Budget(fraction=0.5),
        ),
        "score_source": score_source("attention", seed=5),
        "layout": Layout.AMX,
    }


def client_of(server, *, retry_seconds=20.0):
    return RemoteClient(server.url, token=TOKEN, retry_seconds=retry_seconds)


@pytest.fixture(scope="module")
def context():
    return torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(3)).tolist()


def decode(session, context, *, temperature=0.0, on_tokens=lambda tokens: None):
    sampler = Sampler(temperature=temperature, seed=4)
    first = sampler.choose(session.prefill(context))
    return decode_speculative(
        session,
        context,
        first_token=first,
        num_tokens=NUM_NEW,
        sampler=sampler,
        eos_token_ids=frozenset(),
        on_tokens=on_tokens,
    )


def local(model, context, **options):
    with CompactionSession(**sides(model)) as session:
        return decode(session, context, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_COM_1_a_remote_run_is_the_local_run(family, temperature, context):
    """COM-1, UPL-1: equal tokens, rounds, drafts and acceptance, greedy and sampled."""
    model = tiny_model(family)
    expected = local(model, context, temperature=temperature)
    with serving(family) as server:
        with RemoteSession(**sides(model), client=client_of(server)) as session:
            found = decode(session, context, temperature=temperature)
            ledger = session.verifier.transfers.ledger
            assert not any_violation(ledger.state)
            assert session.runtime.num_selections > 3
            assert session.runtime.metrics.cpu_gather_bytes == 0
            assert session.runtime.metrics.cpu_destination_blocks == 0
            assert len(server.segments()) > 0
        assert found == expected
        assert server.segments() == []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_CAP_4_a_killed_and_restarted_server_is_replaced(family, context):
    """CAP-4, COM-8: kill -9 between rounds; handshake, prefill, full plan, the same tokens."""
    model = tiny_model(family)
    expected = local(model, context)
    servers = [start(family)]
    port = int(servers[0].url.rsplit(":", 1)[1])

    def kill_once(tokens):
        heard.extend(tokens)
        if len(servers) == 1 and len(heard) > 20:
            servers[0].kill()
            servers.append(start(family, port=port))

    heard = []
    try:
        with RemoteSession(**sides(model), client=client_of(servers[0])) as session:
            found = decode(session, context, on_tokens=kill_once)
            assert session.num_recoveries == 1
            assert not any_violation(session.verifier.transfers.ledger.state)
        assert found.tokens == expected.tokens
        assert servers[1].segments() == []
    finally:
        for server in servers:
            server.kill()


@pytest.mark.slow
def test_CAP_4_a_server_that_dies_again_during_the_recovery_is_replaced_again(context):
    """CAP-4, COM-8: the second server is killed before the confirmed tokens are prefilled on it."""
    model = tiny_model("llama")
    expected = local(model, context)
    servers = [start("llama")]
    port = int(servers[0].url.rsplit(":", 1)[1])

    def restart_server():
        servers[-1].kill()
        servers.append(start("llama", port=port))

    def kill_once(tokens):
        heard.extend(tokens)
        if len(servers) == 1 and len(heard) > 20:
            restart_server()

    heard = []
    try:
        with RemoteSession(**sides(model), client=client_of(servers[0])) as session:
            prefill = session.verifier.prefill

            def prefill_around_a_restart(token_ids):
                if len(servers) == 2:
                    restart_server()
                return prefill(token_ids)

            session.verifier.prefill = prefill_around_a_restart
            found = decode(session, context, on_tokens=kill_once)
            assert len(servers) == 3
            assert session.num_recoveries == 2
            assert not any_violation(session.verifier.transfers.ledger.state)
        assert found.tokens == expected.tokens
        assert servers[-1].segments() == []
    finally:
        for server in servers:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_COM_8_a_server_that_dies_before_its_memory_is_opened_is_replaced(num_ranks, context):
    """COM-8, CAP-4: kill -9 between the answer to a prefill and the opening of its segment."""
    model = tiny_model("llama")
    expected = local(model, context)
    servers = [start("llama")]
    port = int(servers[0].url.rsplit(":", 1)[1])
    client = client_of(servers[0])
    call = client.call

    def call_then_die(path, *arguments, **options):
        answer = call(path, *arguments, **options)
        if path == "prefill" and len(servers) == 1:
            servers[0].kill()
            servers.append(start("llama", port=port))
        return answer

    client.call = call_then_die
    try:
        with RemoteSession(**sides(model), client=client, num_ranks=num_ranks) as session:
            found = decode(session, context)
            assert session.num_recoveries == 1
            assert not any_violation(session.verifier.transfers.ledger.state)
        assert found == expected  # Nothing had been decoded, so not even a rounding differs.
        assert servers[1].segments() == []
    finally:
        for server in servers:
            server.kill()


@pytest.mark.slow
def test_COM_8_a_server_that_dies_before_a_rank_opens_its_memory_is_replaced(context):
    """COM-8, CAP-4: this process has the segment open; the rank processes come too late."""
    model = tiny_model("llama")
    expected = local(model, context)
    servers = [start("llama")]
    port = int(servers[0].url.rsplit(":", 1)[1])
    try:
        with RemoteSession(**sides(model), client=client_of(servers[0]), num_ranks=2) as session:
            open_source = session.ranks.open_source

            def die_then_open(*arguments, **options):
                if len(servers) == 1:
                    servers[0].kill()
                    servers.append(start("llama", port=port))
                open_source(*arguments, **options)

            session.ranks.open_source = die_then_open
            found = decode(session, context)
            assert session.num_recoveries == 1
            assert session.ranks.group.num_replaced == 0
            assert not any_violation(session.verifier.transfers.ledger.state)
        assert found == expected
        assert servers[1].segments() == []
    finally:
        for server in servers:
            server.kill()


@pytest.mark.slow
def test_memory_that_cannot_be_opened_though_its_server_lives_is_one_clear_line(context):
    """Another container or user: no recovery helps, and none is tried."""
    model = tiny_model("llama")
    with serving("llama") as server:
        client = client_of(server)
        call = client.call

        def call_elsewhere(path, *arguments, **options):
            answer = call(path, *arguments, **options)
            if path != "prefill":
                return answer
            segment = answer.segment.model_copy(update={"fd": 99_999})
            return answer.model_copy(update={"segment": segment})

        client.call = call_elsewhere
        with RemoteSession(**sides(model), client=client) as session:
            with pytest.raises(SegmentError, match="cannot be opened"):
                session.prefill(context)
            assert session.num_recoveries == 0
        assert server.segments() == []


@pytest.mark.slow
def test_COM_7_a_server_killed_within_a_transfer_leaves_the_old_state(context):
    """COM-7, UPL-4: killed after the lease, before the bytes: old tables stand, then one line."""
    model = tiny_model("llama")
    server = start("llama")
    session = RemoteSession(**sides(model), client=client_of(server, retry_seconds=0.5))
    try:
        session.prefill(context)
        runtime, residency = session.runtime, session.runtime.residency
        upload = session.runtime._move

        def kill_then_upload(plan):
            server.kill()
            upload(plan)  # The pages of a dead server stay mapped.
            raise ServerLostError("as if a later step had noticed")

        session.runtime._move = kill_then_upload
        with pytest.raises(ServerLostError, match="does not answer"):
            session.reselect()
        assert runtime.residency is residency
        ledger = session.verifier.transfers.ledger
        assert not any_violation(ledger.state)
        assert ledger.retiring_slots(0) == []
    finally:
        session.close()
        server.kill()


@pytest.mark.slow
def test_OWN_3_the_ledger_commits_nothing_while_tables_are_read(context):
    """OWN-3, COM-7: busy tables abort the operation; ledger, leases and residency are as before."""
    model = tiny_model("llama")
    with (
        serving("llama") as server,
        RemoteSession(**sides(model), client=client_of(server)) as session,
    ):
        session.prefill(context)
        ledger, name = session.verifier.transfers.ledger, session.verifier._request_id
        residency, revisions = session.runtime.residency, ledger.revisions(name)
        slots = ledger.resident_slots(name)
        with session.resident.tables.reading(), pytest.raises(TablesBusyError):
            session.reselect()
        assert session.runtime.residency is residency
        assert ledger.revisions(name).selection_revision == revisions.selection_revision
        assert ledger.resident_slots(name) == slots
        assert not any_violation(ledger.state)
        session.reselect()
        assert ledger.revisions(name).selection_revision == revisions.selection_revision + 1


@pytest.mark.slow
def test_COM_8_a_vanished_client_is_released(context):
    """COM-8: a client that says nothing any more holds no segment after its lease."""
    model = tiny_model("llama")
    with serving("llama", lease_seconds=1.0) as server:
        session = RemoteSession(**sides(model), client=client_of(server))
        session.prefill(context)
        time.sleep(2.5)
        assert server.segments() != []  # Heartbeats keep it.
        session.verifier._stop_heartbeat()
        deadline = time.monotonic() + 10
        while server.segments() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server.segments() == []
        with pytest.raises(ServerLostError, match="not open"):
            session.verifier.verify([1, 2], is_scored=False)
        session.close()


@pytest.mark.slow
def test_full_shared_memory_is_one_clear_line(context):
    model = tiny_model("llama")
    with serving("llama", memory_bytes=100_000) as server:
        session = RemoteSession(**sides(model), client=client_of(server))
        with pytest.raises(RemoteRefusedError, match="bytes of shared memory"):
            session.prefill(context)
        assert server.segments() == []
        session.close()


@pytest.mark.slow
def test_CAP_2_different_sides_do_not_start(context):
    """CAP-2: the field and both values are named."""
    with serving("llama") as server:
        with pytest.raises(RemoteRefusedError, match="`model`"):
            RemoteSession(**sides(tiny_model("gemma")), client=client_of(server))
        with pytest.raises(RemoteRefusedError, match=r"`block_tokens` is 32 .* and 64"):
            RemoteSession(**sides(tiny_model("llama"), block_tokens=64), client=client_of(server))
        wrong = RemoteClient(server.url, token="x" * 40)
        with pytest.raises(RemoteRefusedError, match="bearer token"):
            RemoteSession(**sides(tiny_model("llama")), client=wrong)


@pytest.mark.slow
def test_a_refused_finish_closes_the_session_all_the_same():
    """The stores are let go of, the model has its attention back, a second `close` is harmless."""
    model = tiny_model("llama")
    with serving("llama") as server:
        client = client_of(server)
        session = RemoteSession(**sides(model), client=client)
        call = client.call

        def refuse(path, *args, **options):
            if path == "finish":
                raise RemoteRefusedError(Refusal.CONFLICT, "as if refused")
            return call(path, *args, **options)

        client.call = refuse
        with pytest.raises(RemoteRefusedError, match="as if refused"):
            session.close()
        assert model.config._attn_implementation == "sdpa"
        with pytest.raises(PoolClosedError):
            session.resident.pool.current_ord()
        session.close()
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_COM_4_lost_and_doubled_messages_change_nothing(context):
    """COM-4: a third of all messages lost, unanswered or doubled; the same run all the same."""
    model = tiny_model("llama")
    expected = local(model, context)
    with serving("llama") as server:
        with faulty_proxy(server.url, seed=6) as (url, faults):
            client = RemoteClient(url, token=TOKEN, retry_seconds=30.0)
            with RemoteSession(**sides(model), client=client) as session:
                found = decode(session, context)
                assert session.num_recoveries == 0
                assert not any_violation(session.verifier.transfers.ledger.state)
        assert min(faults.counts.values()) > 1
        assert found == expected
        assert server.segments() == []
