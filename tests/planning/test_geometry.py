"""Geometry: rows, groups, windows, hash, and its refusals."""

import dataclasses

import pytest

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.geometry import (
    GroupGeometry,
    LayerKind,
    ModelGeometry,
    OwnershipGranularity,
    check_restore_covers,
    num_whole_blocks,
    window_blocks,
)

from . import builders as b


def gemma_like():
    windows = [None if layer in (5, 11, 17) else 512 for layer in range(18)]
    return ModelGeometry.uniform(
        num_layers=18,
        num_query_heads=4,
        num_kv_heads=1,
        head_dim=256,
        block_tokens=32,
        dtype="bfloat16",
        layout="vec",
        window_by_layer=windows,
    )


def test_UPL_2_rows_are_the_full_attention_layers():
    """UPL-2: sliding layers have no row; rows map to decoder layers."""
    geometry = gemma_like()
    assert geometry.full_layers == (5, 11, 17)
    assert geometry.layer_by_row.tolist() == [5, 11, 17]
    assert geometry.group_by_row.tolist() == [0, 0, 0]
    assert geometry.full_groups == (0,)
    assert geometry.row_of_layer(11) == 1
    with pytest.raises(CompactionError, match="`layer` 6 has no row"):
        geometry.row_of_layer(6)
    assert geometry.block_bytes(5) == 2 * 32 * 1 * 256 * 2


def test_UPL_2_sliding_only_models_have_no_row():
    """UPL-2: a model without full attention has empty plans, not empty rows."""
    geometry = b.geometry(((0, 1),), windows={0: 8, 1: 8})
    assert geometry.num_rows == 0
    assert geometry.full_groups == ()


def test_OWN_1_owner_maps():
    """OWN-1: rows share an owner by group, or own themselves."""
    geometry = b.geometry(((0, 3), (1,), (2,)), windows={1: 8})
    assert geometry.full_layers == (0, 2, 3)
    group, layer = OwnershipGranularity.GROUP, OwnershipGranularity.LAYER
    assert geometry.owner_by_row(group).tolist() == [0, 1, 0]
    assert geometry.owner_by_row(layer).tolist() == [0, 1, 2]
    assert geometry.layer_by_owner(group).tolist() == [0, 2]
    assert geometry.num_owners(layer) == 3


def test_RET_8_the_window_comes_from_the_layer():
    """RET-8: layers of one group may differ; each window is its own layer's."""
    geometry = b.geometry(((0, 1, 2),), windows={1: 8, 2: 20}, block_tokens=4)
    assert list(window_blocks(geometry.layer_geometry(1), 40, 4)) == [8, 9]
    assert list(window_blocks(geometry.layer_geometry(2), 40, 4)) == [5, 6, 7, 8, 9]
    with pytest.raises(CompactionError, match="`layer` 0 is a full-attention layer"):
        window_blocks(geometry.layer_geometry(0), 40, 4)


@pytest.mark.parametrize("num_tokens", [1, 30, 35, 36, 46, 47, 48, 49])
@pytest.mark.parametrize("window", [1, 16, 32])
def test_RET_8_window_blocks_cover_what_the_next_token_reads(num_tokens, window):
    """RET-8: exactly the blocks with a token of the window, a block's first or last too."""
    facts = b.layer(0, window)
    read = range(max(0, num_tokens - window + 1), num_tokens)
    got = set(window_blocks(facts, num_tokens, 16))
    assert {token // 16 for token in read} <= got
    assert got <= {token // 16 for token in read} | {(num_tokens - 1) // 16}


def test_RET_8_a_restore_covers_what_was_retained():
    """RET-8: window 32, retained 35, B = 16: two blocks are not enough; all or nothing."""
    settings = {"num_tokens": 48, "num_retained_tokens": 35, "block_tokens": 16, "layer": 4}
    check_restore_covers([0, 1, 2], **settings)
    with pytest.raises(CompactionError, match=r"layer 4 lacks blocks \[0\]"):
        check_restore_covers([1, 2], **settings)


@pytest.mark.parametrize("block_tokens", [1, 2, 32, 64])
def test_SEL_2_whole_blocks(block_tokens):
    """SEL-2: B - 1, B, B + 1 tokens."""
    got = [num_whole_blocks(block_tokens + extra, block_tokens) for extra in (-1, 0, 1)]
    assert got == [0, 1, 2 if block_tokens == 1 else 1]
    with pytest.raises(CompactionError, match="`num_confirmed_tokens` is -1"):
        num_whole_blocks(-1, block_tokens)


def test_CAP_2_the_layout_hash_sees_every_fact():
    """Equal facts hash alike, and each changed fact changes the hash."""
    geometry = gemma_like()
    assert geometry.layout_hash == gemma_like().layout_hash
    assert hash(geometry) == hash(gemma_like())
    sliding = geometry.layers[0]
    changed = [
        dataclasses.replace(geometry, block_tokens=16),
        dataclasses.replace(geometry, dtype="float32"),
        dataclasses.replace(geometry, layout="amx"),
        dataclasses.replace(
            geometry,
            groups=(
                GroupGeometry(group=0, layers=geometry.groups[1].layers),
                GroupGeometry(group=1, layers=geometry.groups[0].layers),
            ),
        ),
    ]
    for change in (
        {"window_tokens": 256},
        {"num_query_heads": 8},
        {"head_dim": 128},
        {"kind": LayerKind.FULL, "window_tokens": None},
    ):
        layers = (dataclasses.replace(sliding, **change), *geometry.layers[1:])
        changed.append(dataclasses.replace(geometry, layers=layers))
    hashes = {geometry.layout_hash, *(other.layout_hash for other in changed)}
    assert len(hashes) == len(changed) + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": -1}, "`layer` is -1"),
        ({"head_dim": 0}, "`head_dim` of layer 0 is 0"),
        ({"num_query_heads": 3}, "no multiple of its 2 KV heads"),
        ({"window_tokens": 8}, "`window_tokens` of layer 0 is 8 on a full layer"),
        ({"kind": LayerKind.SLIDING}, "is None on a sliding layer"),
        ({"kind": LayerKind.SLIDING, "window_tokens": 0}, "`window_tokens` of layer 0 is 0"),
    ],
)
def test_CAP_2_impossible_layers_are_refused(changes, message):
    """A layer that cannot exist is refused where it is described."""
    with pytest.raises(CompactionError, match=message):
        b.layer(**({"layer_id": changes.get("layer", 0)} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tokens": 0}, "`block_tokens` is 0"),
        ({"dtype": "float13"}, "`dtype` 'float13' is not an element type"),
        ({"layers": ()}, "`layers` has the IDs"),
        ({"groups": (GroupGeometry(group=0, layers=(0,)),)}, r"layers \[1\] are missing"),
        ({"groups": (GroupGeometry(group=0, layers=(0, 1, 1)),)}, r"layers \[1\]"),
        ({"groups": (GroupGeometry(group=0, layers=(0, 1, 7)),)}, r"layers \[7\]"),
        ({"groups": (GroupGeometry(group=1, layers=(0,)),) * 2}, r"`groups` has the IDs \[1, 1\]"),
    ],
)
def test_CAP_2_impossible_models_are_refused(changes, message):
    """Groups partition the layers; sizes and names are real."""
    with pytest.raises(CompactionError, match=message):
        dataclasses.replace(b.geometry(((0, 1),)), **changes)
