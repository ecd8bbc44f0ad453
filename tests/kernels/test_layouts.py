import numpy as np
import pytest

from blockcompact_jax.kernels import (
    Layout,
    UnsupportedLayoutError,
    check_layout,
    packed_k_offsets,
    packed_v_offsets,
)

from .reference import packed_places

PACKED = [
    (Layout.AMX, 32, 32, 2),
    (Layout.AMX, 64, 96, 2),
    (Layout.AMX, 32, 64, 4),
    (Layout.VEC, 1, 3, 1),
    (Layout.VEC, 7, 80, 2),
    (Layout.VEC, 64, 16, 4),
]


@pytest.mark.parametrize(("layout", "tokens", "dims", "element_bytes"), PACKED)
def test_offsets_are_the_defined_ones(layout, tokens, dims, element_bytes):
    shape = {"block_tokens": tokens, "head_dim": dims, "element_bytes": element_bytes}
    k_place, v_place = packed_places(layout.label, tokens, dims, element_bytes)
    np.testing.assert_array_equal(packed_k_offsets(layout, **shape), k_place)
    np.testing.assert_array_equal(packed_v_offsets(layout, **shape), v_place)


@pytest.mark.parametrize(("layout", "tokens", "dims", "element_bytes"), PACKED)
def test_offsets_are_permutations(layout, tokens, dims, element_bytes):
    shape = {"block_tokens": tokens, "head_dim": dims, "element_bytes": element_bytes}
    for offsets in (packed_k_offsets(layout, **shape), packed_v_offsets(layout, **shape)):
        np.testing.assert_array_equal(np.sort(offsets, axis=None), np.arange(tokens * dims))


@pytest.mark.parametrize(
    ("layout", "tokens", "dims", "element_bytes", "words"),
    [
        (Layout.AMX, 16, 64, 2, ["amx", "block_tokens", "16", "vec"]),
        (Layout.AMX, 32, 80, 2, ["amx", "head_dim", "80", "vec"]),
        (Layout.AMX, 32, 64, 1, ["amx", "element_bytes", "vec"]),
        (Layout.VEC, 0, 64, 2, ["block_tokens", "positive"]),
        (Layout.PLAIN_HND, 32, -1, 2, ["head_dim", "positive"]),
        (Layout.VEC, 32, 64, 8, ["element_bytes", "8"]),
    ],
)
def test_UPL_5_what_a_layout_cannot_hold_is_refused_by_name(
    layout, tokens, dims, element_bytes, words
):
    """UPL-5: an unsupported shape is refused by capability, never packed some other way."""
    with pytest.raises(UnsupportedLayoutError) as refusal:
        check_layout(layout, block_tokens=tokens, head_dim=dims, element_bytes=element_bytes)
    for word in words:
        assert word in str(refusal.value)


def test_plain_layouts_have_no_packed_offsets():
    with pytest.raises(UnsupportedLayoutError, match="plain_nhd"):
        packed_k_offsets(Layout.PLAIN_NHD, block_tokens=32, head_dim=32, element_bytes=2)
