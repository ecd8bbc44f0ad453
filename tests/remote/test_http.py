"""The server's messages, without a client of ours: retries, conflicts, access, fuzzing."""

import os
import socket
import stat

import httpx
import pytest

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.remote.access import create_or_read_token, read_token
from blockcompact_jax.remote.client import RemoteClient

from .tiny import TOKEN, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    with serving("llama") as running:
        yield running


@pytest.fixture
def http(server):
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def names(http, request):
    epoch = http.get("/v1/health").json()["process_epoch"]
    fields = {"process_epoch": epoch, "request_id": request.node.name, "request_epoch": 1}
    yield fields
    http.post("/v1/finish", json=fields)


def prefill(http, names, *, operation_id=0, num_tokens=70, num_copy_blocks=0):
    message = {
        **names,
        "operation_id": operation_id,
        "token_ids": list(range(num_tokens)),
        "max_tokens": 200,
        "num_draft_tokens": 3,
        "num_copy_blocks": num_copy_blocks,
    }
    return http.post("/v1/prefill", json=message)


def verify(names, *, operation_id=1, first=70, tokens=(1, 2, 3, 4)):
    return {
        **names,
        "operation_id": operation_id,
        "first_token_position": first,
        "token_ids": list(tokens),
        "is_scoring": True,
    }


def upload(names, *, operation_id=2, num_tokens=72, source_block=1, layer=0):
    key = {**names, "operation_id": operation_id, "pool_generation": 0, "map_revision": 0}
    rows = {
        "layer": [layer],
        "group": [0],
        "logical_block": [source_block],
        "source_block": [source_block],
        "cpu_destination_block": [-1],
        "physical_block": [5],
        "valid_tokens": [32],
    }
    return {
        "key": key,
        "selection_revision": 1,
        "source_kind": "source_only",
        "num_tokens": num_tokens,
        "rows": rows,
    }


def test_COM_4_a_repeated_message_gets_the_stored_result(http, names, server):
    """COM-4: no second prefill, segment, verification or lease; another body is a conflict."""
    first, again = prefill(http, names), prefill(http, names)
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert prefill(http, names, num_tokens=71).status_code == 409
    done = [http.post("/v1/verify", json=verify(names)) for _ in range(2)]
    assert [answer.json() for answer in done] == [{"num_tokens": 74}] * 2
    assert http.post("/v1/verify", json=verify(names, tokens=(9,))).status_code == 409
    for _ in range(2):
        answer = http.post("/v1/compaction_upload", json=upload(names))
        assert answer.json() == {"num_packed_blocks": 2}
        assert http.get("/v1/health").json()["num_leases"] == 1
    ack = {"key": upload(names)["key"]}
    assert http.post("/v1/ack", json=ack).json() == {"is_repeated": False}
    assert http.post("/v1/ack", json=ack).json() == {"is_repeated": True}
    assert http.get("/v1/health").json()["num_leases"] == 0
    finished = [http.post("/v1/finish", json=names).json() for _ in range(2)]
    assert finished == [{"is_repeated": False}, {"is_repeated": True}]
    assert prefill(http, names).status_code == 404  # A late duplicate opens nothing again.


def test_COM_3_an_ack_must_name_the_whole_operation(http, names):
    """COM-3, COM-7: future and conflicting ACKs are errors; an abort releases the lease."""
    prefill(http, names)
    key = upload(names, num_tokens=70)["key"]
    assert http.post("/v1/ack", json={"key": key}).status_code == 404
    http.post("/v1/compaction_upload", json=upload(names, num_tokens=70))
    other = {**key, "map_revision": 7}
    assert http.post("/v1/ack", json={"key": other}).status_code == 409
    second = upload(names, operation_id=3, num_tokens=70)
    assert http.post("/v1/compaction_upload", json=second).status_code == 409
    abort = {"key": key, "reason": "test"}
    assert http.post("/v1/abort", json=abort).json() == {"is_repeated": False}
    assert http.get("/v1/health").json()["num_leases"] == 0
    assert http.post("/v1/compaction_upload", json=second).status_code == 200


@pytest.mark.parametrize("change", [{"source_block": 2}, {"layer": 9}, {"num_tokens": 75}])
def test_UPL_7_impossible_rows_are_refused(http, names, change):
    """UPL-7: an unpacked source, an unknown layer, unverified tokens."""
    prefill(http, names)
    http.post("/v1/verify", json=verify(names))
    assert http.post("/v1/compaction_upload", json=upload(names, **change)).status_code in {
        409,
        422,
    }
    assert http.get("/v1/health").json()["num_leases"] == 0
    assert http.post("/v1/compaction_upload", json=upload(names)).status_code == 200


def test_CAP_4_another_process_epoch_is_refused(http, names):
    """CAP-4: every message of an old epoch, whatever it asks."""
    old = {**names, "process_epoch": names["process_epoch"] - 1}
    answers = [prefill(http, old), http.post("/v1/verify", json=verify(old))]
    answers.append(http.post("/v1/compaction_upload", json=upload(old)))
    answers.append(http.post("/v1/ack", json={"key": upload(old)["key"]}))
    answers.append(http.post("/v1/finish", json=old))
    assert {answer.status_code for answer in answers} == {410}


def answer_to_large_body(url):
    """The status of a message that only announces a large body; it is refused before it is read."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/finish HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1073741824\r\n\r\n"
        )
        return connection.recv(4096).split()[1].decode()


def test_limits_and_access(http, names, server):
    assert httpx.post(f"{server.url}/v1/finish", json=names, trust_env=False).status_code == 401
    assert httpx.get(f"{server.url}/metrics", trust_env=False).status_code == 401
    assert prefill(http, names, num_tokens=201).status_code == 413
    assert answer_to_large_body(server.url) == "413"
    assert http.post("/v1/finish", json={**names, "more": 1}).status_code == 422
    assert "blockcompact_requests" in http.get("/metrics").text


def test_tokens_lie_in_private_files(tmp_path, monkeypatch):
    path = tmp_path / "token"
    token = create_or_read_token(path)
    assert read_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.chmod(path, 0o644)
    with pytest.raises(CompactionError, match="can be read by others"):
        read_token(path)
    with pytest.raises(CompactionError, match=r"`token_file` .*cannot be made"):
        create_or_read_token(tmp_path / "nowhere" / "token")
    monkeypatch.delenv("BLOCKCOMPACT_TOKEN", raising=False)
    with pytest.raises(CompactionError, match="BLOCKCOMPACT_TOKEN"):
        read_token(None)
    with pytest.raises(CompactionError, match="loopback"):
        RemoteClient("http://192.0.2.1:80", token=token)


def test_many_open_requests_leave_nothing(http, names, server):
    """COM-8: 1,000 requests open at once, then finished: no segment, no descriptor."""
    num_open = len(os.listdir(f"/proc/{server.pid}/fd"))
    many = [{**names, "request_id": f"many-{number}"} for number in range(1000)]
    for each in many:
        assert prefill(http, each, num_tokens=33).status_code == 200
    assert http.get("/v1/health").json()["num_requests"] == 1000
    for each in many:
        assert http.post("/v1/finish", json=each).status_code == 200
    health = http.get("/v1/health").json()
    assert health["num_requests"] == health["shared_bytes"] == 0
    assert server.segments() == []
    assert len(os.listdir(f"/proc/{server.pid}/fd")) <= num_open + 2


def test_its_own_schema_finds_no_server_error(server):
    schemathesis = pytest.importorskip("schemathesis", reason="needs the [dev] extra: schemathesis")
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses = []

    for operation in schema.get_all_operations():
        strategy = operation.ok().as_strategy()

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=strategy)
        def fuzz(case):
            answer = case.call(headers={"authorization": f"Bearer {TOKEN}"})
            statuses.append(answer.status_code)
            assert answer.status_code < 500

        fuzz()
    assert len(statuses) > 100
