"""CAP: the handshake names what differs, and nothing starts."""

import dataclasses

import pytest

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.ledger import OperationKey
from blockcompact_jax.protocol import (
    PROTOCOL_VERSION,
    Ack,
    Capabilities,
    CompactionUpload,
    CpuPoolArea,
    Finish,
    HandshakeError,
    Initialize,
    SelectionUnit,
    UploadRows,
    Verify,
    canonical_body,
    capabilities_of,
    shake_hands,
)
from blockcompact_jax.upload import SourceKind

GEOMETRY = ModelGeometry.uniform(
    num_layers=3,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=32,
    block_tokens=32,
    dtype="bfloat16",
    layout="amx",
    window_by_layer=(None, 64, None),
)
BOTH = frozenset(SourceKind)
DIRECT, COPY = (frozenset({kind}) for kind in (SourceKind.SOURCE_ONLY, SourceKind.CPU_COPY))
EMPTY_AREA = CpuPoolArea(num_source_blocks=8, num_cpu_blocks=8)
AREA = CpuPoolArea(num_source_blocks=8, num_cpu_blocks=12)
KEY = OperationKey(
    process_epoch=1,
    request_id="a",
    request_epoch=2,
    operation_id=3,
    pool_generation=4,
    map_revision=5,
)


def side(kinds=DIRECT, **changes) -> Capabilities:
    made = capabilities_of(GEOMETRY, model="m@1", process_epoch=1, source_kinds=kinds)
    return dataclasses.replace(made, **changes)


def test_CAP_1_equal_sides_agree_once():
    """CAP-1, CAP-3: with source_only on both, an empty area is no obstacle."""
    agreement = shake_hands(side(), side(BOTH), area=EMPTY_AREA)
    assert agreement.source_kind is SourceKind.SOURCE_ONLY
    assert not agreement.is_fallback
    assert agreement.capabilities == side()


DIFFERENCES = {
    "method": "token",
    "protocol_version": PROTOCOL_VERSION + 1,
    "selection_unit": SelectionUnit.TOKEN,
    "block_tokens": 64,
    "kv_dtype": "float32",
    "model": "m@2",
    "layout_hash": "0" * 64,
    "keep_map_version": 2,
    "process_epoch": 2,
}


@pytest.mark.parametrize(("field", "value"), DIFFERENCES.items())
def test_CAP_2_a_mismatch_names_the_field_and_both_values(field, value):
    """CAP-1, CAP-2, CAP-4: every field of the handshake is compared."""
    with pytest.raises(HandshakeError, match=f"`{field}`") as raised:
        shake_hands(side(), side(**{field: value}), area=EMPTY_AREA)
    error = raised.value
    assert (error.field, error.producer, error.consumer) == (field, getattr(side(), field), value)
    assert repr(value) in str(error)
    assert repr(getattr(side(), field)) in str(error)
    assert str(error).endswith("Nothing was started.")


def test_CAP_2_every_field_is_compared():
    """CAP-2: no field of the handshake is forgotten by the test above."""
    names = {field.name for field in dataclasses.fields(Capabilities)}
    assert names == set(DIFFERENCES) | {"source_kinds"}


def test_CAP_2_layers_and_groups_are_in_the_hash():
    """CAP-2: one window more, or another packed layout, is another layout."""
    other = dataclasses.replace(GEOMETRY, layout="vec")
    theirs = capabilities_of(other, model="m@1", process_epoch=1)
    with pytest.raises(HandshakeError, match="`layout_hash`"):
        shake_hands(side(), theirs, area=EMPTY_AREA)


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [(BOTH, COPY), (COPY, BOTH), (COPY, DIRECT)])
def test_CAP_3_an_empty_area_without_source_only_fails(ours, theirs, is_asked):
    """CAP-3: asked for or not, there is nothing to copy to."""
    with pytest.raises(HandshakeError, match=r"\[8, 8\).*is empty.*serve --copy-area"):
        shake_hands(side(ours), side(theirs), area=EMPTY_AREA, is_copy_fallback_asked=is_asked)


def test_CAP_3_a_fallback_is_asked_for_and_possible():
    """CAP-3: never silently; only where both can copy and an area exists."""
    with pytest.raises(HandshakeError, match="was not asked for"):
        shake_hands(side(BOTH), side(COPY), area=AREA)
    with pytest.raises(HandshakeError, match="cannot copy"):
        shake_hands(side(DIRECT), side(COPY), area=AREA, is_copy_fallback_asked=True)
    agreement = shake_hands(side(BOTH), side(COPY), area=AREA, is_copy_fallback_asked=True)
    assert (agreement.source_kind, agreement.is_fallback) == (SourceKind.CPU_COPY, True)
    direct = shake_hands(side(BOTH), side(BOTH), area=AREA, is_copy_fallback_asked=True)
    assert (direct.source_kind, direct.is_fallback) == (SourceKind.SOURCE_ONLY, False)


@pytest.mark.parametrize(
    "field", ["protocol_version", "block_tokens", "keep_map_version", "process_epoch"]
)
def test_CAP_2_impossible_values_are_refused(field):
    """CAP-2: two sides that agree on nonsense do not start."""
    nonsense = side(**{field: 0})
    with pytest.raises(CompactionError, match=f"`{field}` is 0"):
        shake_hands(nonsense, nonsense, area=EMPTY_AREA)


def test_COM_4_equal_messages_have_equal_bodies():
    """COM-4: a retry has the same bytes, any other message has others."""
    rows = UploadRows(
        layer=(0,),
        group=(0,),
        logical_block=(1,),
        source_block=(1,),
        cpu_destination_block=(-1,),
        physical_block=(9,),
        valid_tokens=(32,),
    )
    upload = CompactionUpload(
        key=KEY,
        selection_revision=1,
        source_kind=SourceKind.SOURCE_ONLY,
        num_tokens=64,
        rows=rows,
    )
    verify = Verify(
        process_epoch=1,
        request_id="a",
        request_epoch=2,
        operation_id=3,
        first_token_position=64,
        token_ids=(1, 2),
        is_scoring=True,
    )
    moved = dataclasses.replace(rows, physical_block=(8,))
    messages = [
        upload,
        dataclasses.replace(upload, rows=moved),
        dataclasses.replace(upload, rows=UploadRows()),
        verify,
        dataclasses.replace(verify, token_ids=(12,)),
        Ack(key=KEY),
        Finish(process_epoch=1, request_id="a", request_epoch=2),
        Initialize(capabilities=side()),
        Initialize(capabilities=side(BOTH)),
    ]
    bodies = [canonical_body(message) for message in messages]
    assert len(set(bodies)) == len(messages)
    assert canonical_body(dataclasses.replace(upload)) == bodies[0]
    assert b'"source_kinds":["cpu_copy","source_only"]' in bodies[-1]
