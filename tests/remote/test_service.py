"""The server's state without a network or a model: what overtakes what."""

import asyncio
import dataclasses
import threading

import pytest

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.ledger.handles import OperationKey
from blockcompact_jax.protocol import (
    Abort,
    Ack,
    CompactionUpload,
    Finish,
    Prefill,
    UploadRows,
    Verify,
    capabilities_of,
)
from blockcompact_jax.remote.errors import RemoteRefusedError
from blockcompact_jax.remote.service import ServiceLimits, VerifierService
from blockcompact_jax.upload import SourceKind

NAMES = {"process_epoch": 1, "request_id": "r", "request_epoch": 1}


class SlowEngine:
    """An engine whose uploads wait for `gate`."""

    num_vocabulary = 100
    max_tokens = 512
    geometry = ModelGeometry.uniform(
        num_layers=1,
        num_query_heads=1,
        num_kv_heads=1,
        head_dim=32,
        block_tokens=32,
        dtype="bfloat16",
        layout="amx",
    )

    def __init__(self):
        self.gate = threading.Event()
        self.confirmed = []
        self.num_prefills = 0

    def capabilities(self, process_epoch):
        return capabilities_of(self.geometry, model="m", process_epoch=process_epoch)

    def open(self, segment, **sizes):
        segment.region("x", 4096)
        return self

    def prefill(self, token_ids):
        self.num_prefills += 1

    def verify(self, token_ids, *, is_scoring):
        pass

    def confirm(self, num_tokens):
        self.confirmed.append(num_tokens)
        if not self.gate.wait(20):
            raise TimeoutError("the test never opened the gate")

    def close(self):
        pass


def key_of(operation_id):
    return OperationKey(**NAMES, operation_id=operation_id, pool_generation=0, map_revision=0)


def upload_of(operation_id):
    return CompactionUpload(
        key=key_of(operation_id),
        selection_revision=1,
        source_kind=SourceKind.SOURCE_ONLY,
        num_tokens=64,
        rows=UploadRows(),
    )


def prefill_of(request_epoch):
    return Prefill(
        **{**NAMES, "request_epoch": request_epoch},
        operation_id=0,
        token_ids=tuple(range(64)),
        max_tokens=128,
        num_draft_tokens=2,
    )


def run(scenario):
    """Runs `scenario(service, engine)` on a prefilled request."""

    async def main():
        engine = SlowEngine()
        limits = ServiceLimits(max_requests=1, memory_bytes=1 << 20, lease_seconds=60.0)
        service = VerifierService(engine, limits, process_epoch=1)
        await service.prefill(prefill_of(request_epoch=1))
        try:
            await scenario(service, engine)
        finally:
            engine.gate.set()
            await service.close()

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", [0, 5])
def test_COM_7_an_abort_waits_for_its_upload_at_work(num_turns):
    """COM-7: the lease that the upload takes in the end is released; the next upload gets one."""

    async def scenario(service, engine):
        upload = asyncio.ensure_future(service.upload(upload_of(1)))
        for _ in range(num_turns):  # 0: the upload has not even begun.
            await asyncio.sleep(0)
        abort = asyncio.ensure_future(service.end_operation(Abort(key=key_of(1), reason="test")))
        await asyncio.sleep(0.05)
        assert not abort.done() or num_turns == 0
        engine.gate.set()
        await asyncio.gather(upload, abort, return_exceptions=True)
        assert service.num_leases == 0
        await service.upload(upload_of(2))
        assert service.num_leases == 1

    run(scenario)


def test_COM_7_an_upload_after_its_abort_is_refused():
    """COM-7: whatever arrives late takes no lease; the next operation goes on."""

    async def scenario(service, engine):
        engine.gate.set()
        assert await service.end_operation(Abort(key=key_of(1), reason="test"))
        with pytest.raises(RemoteRefusedError, match="not newer"):
            await service.upload(upload_of(1))
        assert service.num_leases == 0
        await service.upload(upload_of(2))
        assert not await service.end_operation(Ack(key=key_of(2)))

    run(scenario)


def test_COM_8_an_abort_of_a_request_that_ends_meanwhile_is_harmless():
    """COM-8: the request is gone once the upload has ended, and so is its lease."""

    async def scenario(service, engine):
        upload = asyncio.ensure_future(service.upload(upload_of(1)))
        await asyncio.sleep(0.05)
        finish = asyncio.ensure_future(service.finish(Finish(**NAMES)))
        abort = asyncio.ensure_future(service.end_operation(Abort(key=key_of(1), reason="test")))
        await asyncio.sleep(0.05)
        engine.gate.set()
        await asyncio.gather(upload, finish, abort)
        assert service.num_requests == service.num_leases == 0

    run(scenario)


def test_UPL_4_what_is_packed_already_asks_nothing_of_the_model():
    """UPL-4: blocks are packed before an upload is answered; once, whatever came in between."""

    async def scenario(service, engine):
        engine.gate.set()
        await service.upload(upload_of(1))
        assert engine.confirmed == [64]  # The prefill alone packs nothing.
        await service.end_operation(Ack(key=key_of(1)))
        await service.upload(upload_of(2))
        assert engine.confirmed == [64]
        await service.end_operation(Ack(key=key_of(2)))
        draft = Verify(
            **NAMES, operation_id=3, first_token_position=64, token_ids=(1, 2), is_scoring=True
        )
        await service.verify(draft)
        assert engine.confirmed == [64, 64]
        assert await service.upload(dataclasses.replace(upload_of(4), num_tokens=65)) == 2
        assert engine.confirmed == [64, 64, 65]

    run(scenario)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"group": (0, 999)}, "'group': 999"),
        ({"group": (1, 0)}, "'group': 1"),
        ({"group": (-1, 0)}, "'group': -1"),
        ({"layer": (0, 7), "group": (0, -1)}, "'layer': 7"),
        ({"source_block": (0, 2), "logical_block": (0, 2)}, "'source_block': 2"),
    ],
)
def test_UPL_7_rows_that_are_none_of_the_model_are_refused(change, expected):
    """UPL-7: a group that is not the layer's takes no lease; the next upload does."""
    rows = UploadRows(
        **{
            "layer": (0, 0),
            "group": (0, 0),
            "logical_block": (0, 1),
            "source_block": (0, 1),
            "cpu_destination_block": (-1, -1),
            "physical_block": (4, 5),
            "valid_tokens": (32, 32),
            **change,
        }
    )

    async def scenario(service, engine):
        engine.gate.set()
        message = dataclasses.replace(upload_of(1), rows=rows)
        if expected is None:
            assert await service.upload(message) == 2
            return
        with pytest.raises(RemoteRefusedError, match=f"{expected}.*and its group"):
            await service.upload(message)
        assert service.num_leases == 0
        await service.upload(upload_of(1))

    run(scenario)


@pytest.mark.parametrize("is_closing_when_repeated", [False, True])
def test_COM_4_a_repeated_prefill_of_a_newer_epoch_opens_one_request(is_closing_when_repeated):
    """COM-4, COM-8: the retry waits for the old epoch's end too; one prefill, one segment."""

    async def scenario(service, engine):
        used_bytes = service.allowance.used_bytes
        has_closed = threading.Event()
        engine.close = lambda: has_closed.wait(20)
        first = asyncio.ensure_future(service.prefill(prefill_of(request_epoch=2)))
        if is_closing_when_repeated:
            await asyncio.sleep(0.05)
        retry = asyncio.ensure_future(service.prefill(prefill_of(request_epoch=2)))
        await asyncio.sleep(0.05)
        has_closed.set()
        handles = await asyncio.gather(first, retry)
        assert handles[0] == handles[1]
        assert engine.num_prefills == 2  # One of each epoch.
        assert service.allowance.used_bytes == used_bytes > 0
        await service.finish(Finish(**{**NAMES, "request_epoch": 2}))
        assert service.num_requests == service.allowance.used_bytes == 0

    run(scenario)


def test_COM_8_a_request_at_work_is_not_lost_however_long_it_takes():
    """COM-8: its lease runs from the end of the work; a silent one is released then, once."""

    async def scenario(service, engine):
        service.limits = dataclasses.replace(service.limits, lease_seconds=0.0)
        upload = asyncio.ensure_future(service.upload(upload_of(1)))
        while not engine.confirmed:
            await asyncio.sleep(0.001)
        assert await asyncio.wait_for(service.release_lost(), 5) == 0
        assert service.num_leases == 0
        engine.gate.set()
        assert await upload == 2
        assert service.num_leases == 1
        await asyncio.sleep(0.001)
        assert [await service.release_lost() for _ in range(2)] == [1, 0]
        assert service.num_leases == 0

    run(scenario)
