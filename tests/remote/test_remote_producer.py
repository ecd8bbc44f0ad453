"""What a server hears of the transfers of a ledger, without a server."""

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.ledger_transfers import LedgerTransfers
from blockcompact_jax.remote.producer import RemoteProducer
from blockcompact_jax.residency import empty_residency
from blockcompact_jax.upload import SourceKind, plan_no_upload


def test_COM_2_a_selection_that_moves_nothing_is_published_and_acknowledged():
    """COM-2, DIF-6: no row is staged; the ledger and the server learn the new revision."""
    geometry = ModelGeometry.uniform(
        num_layers=1,
        num_query_heads=1,
        num_kv_heads=1,
        head_dim=16,
        block_tokens=32,
        dtype="bfloat16",
        layout="vec",
    )
    basis = empty_residency(geometry, max_slots=4).revisions
    sent = []
    producer = RemoteProducer(lambda name, message: sent.append((name, message)))
    transfers = LedgerTransfers("request", producer=producer)
    before = transfers.ledger.revisions("request")
    for source_kind in SourceKind:
        with transfers.transaction(plan_no_upload(basis, source_kind=source_kind), 64):
            transfers.landed(0, transfers.open_key)
        transfers.acknowledge()
    after = transfers.ledger.revisions("request")
    assert after.selection_revision == before.selection_revision + 2
    assert after.pool_generation == before.pool_generation
    assert [name for name, _ in sent] == ["compaction_upload", "ack"] * 2
    uploads = [message.to_message() for name, message in sent if name == "compaction_upload"]
    assert [upload.source_kind for upload in uploads] == list(SourceKind)
    assert [upload.selection_revision for upload in uploads] == [1, 2]
    for upload in uploads:
        assert [len(column) for column in vars(upload.rows).values()] == [0] * 7
