"""The copy fallback: the server gathers blocks first, only where that was asked for and can be."""

import httpx
import pytest

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.remote.errors import RemoteRefusedError
from torch_bridge.huggingface.remote import RemoteSession

from .test_http import prefill, upload
from .test_remote_session import (
    any_violation,
    client_of,
    context,  # noqa: F401  # a fixture
    decode,
    local,
    sides,
)
from .tiny import TOKEN, serving, tiny_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("family", "num_ranks"), [("uneven", 1), ("uneven", 2)])
def test_CMP_1_copying_gives_the_same_run_and_is_booked(family, num_ranks, context):  # noqa: F811
    """CMP-1, MET-2, UPL-3: equal tokens; gathered bytes and destinations are booked by name."""
    model = tiny_model(family)
    expected = local(model, context)
    with serving(family, copy_blocks=200) as server:
        session = RemoteSession(
            **sides(model), client=client_of(server), is_copying=True, num_ranks=num_ranks
        )
        with session:
            found = decode(session, context)
            metrics = session.runtime.metrics
            assert metrics.cpu_gather_bytes == metrics.h2d_bytes > 0
            assert metrics.cpu_destination_blocks * session.sizes.shape.block_bytes == (
                metrics.cpu_gather_bytes
            )
            assert not any_violation(session.verifier.transfers.ledger.state)
        assert found == expected
        assert server.segments() == []


def test_CAP_3_copying_fails_at_start_without_an_area(context):  # noqa: F811
    """CAP-3: an empty area; an area that is too small; both before anything starts."""
    model = tiny_model("llama")
    with (
        serving("llama") as server,
        pytest.raises(RemoteRefusedError, match="to copy them to is empty"),
    ):
        RemoteSession(**sides(model), client=client_of(server), is_copying=True)
    with serving("llama", copy_blocks=5) as server:
        with pytest.raises(CompactionError, match="--copy-area"):
            RemoteSession(**sides(model), client=client_of(server), is_copying=True)
        assert httpx.get(f"{server.url}/v1/health", trust_env=False).json()["num_requests"] == 0


@pytest.fixture(scope="module")
def copying_server():
    with serving("llama", copy_blocks=8) as running:
        yield running


@pytest.fixture
def http(copying_server):
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(
        base_url=copying_server.url, headers=headers, timeout=60, trust_env=False
    ) as client:
        yield client


def test_CAP_3_nothing_is_copied_unasked(http, copying_server):
    """CAP-3: a side that cannot read in place and does not ask is refused; asking is enough."""
    from torch_bridge.huggingface.serve import ModelEngine  # Its own capabilities, from here.

    engine = ModelEngine(
        model=tiny_model("llama"),
        block_tokens=32,
        layout=sides(None)["layout"],
        attention="blocks",
        max_tokens=1024,
    )
    epoch = http.get("/v1/health").json()["process_epoch"]
    ours = engine.capabilities(epoch)
    message = {
        "capabilities": {
            **vars(ours),
            "selection_unit": ours.selection_unit.value,
            "source_kinds": ["cpu_copy"],
        }
    }
    unasked = http.post("/v1/initialize", json=message)
    assert unasked.status_code == 409
    assert "it was not asked for" in unasked.json()["message"]
    asked = http.post("/v1/initialize", json={**message, "is_copy_fallback_asked": True})
    assert asked.json()["source_kind"] == "cpu_copy"
    assert asked.json()["max_copy_blocks"] == 8


def test_UPL_7_copies_go_into_the_area_and_nowhere_else(http):
    """UPL-7, CAP-3: destinations outside of [K, N), named twice, or without an area."""
    epoch = http.get("/v1/health").json()["process_epoch"]
    names = {"process_epoch": epoch, "request_id": "r", "request_epoch": 1}
    assert prefill(http, names, num_copy_blocks=9).status_code == 413
    assert prefill(http, names, num_copy_blocks=2).status_code == 200
    num_sources = 7  # 200 tokens, blocks of 32.
    good = copying(names, [num_sources, num_sources + 1])
    for destinations in ([6, 7], [7, 9], [-1, 7], [7, 7]):
        bad = http.post("/v1/compaction_upload", json=copying(names, destinations))
        assert bad.status_code == 422, destinations
        assert http.get("/v1/health").json()["num_leases"] == 0
    assert http.post("/v1/compaction_upload", json=good).status_code == 200
    http.post("/v1/finish", json=names)
    direct = {**names, "request_epoch": 2}
    assert prefill(http, direct).status_code == 200
    refused = http.post("/v1/compaction_upload", json=copying(direct, [7, 8]))
    assert refused.status_code == 422
    assert "no compaction area" in refused.json()["message"]
    http.post("/v1/finish", json=direct)


def copying(names, destinations):
    message = upload(names, num_tokens=70)
    rows = {name: column * len(destinations) for name, column in message["rows"].items()}
    rows |= {"layer": list(range(len(destinations))), "cpu_destination_block": destinations}
    return {**message, "source_kind": "cpu_copy", "rows": rows}
