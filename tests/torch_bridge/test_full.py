"""The full KV store against a plain tensor that every write is repeated on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.kernels import Layout
from torch_bridge.full import FullKV
from torch_bridge.pools import KVShape

SHAPE = KVShape(num_rows=2, num_kv_heads=2, block_tokens=4, head_dim=8, dtype=torch.bfloat16)


def _random(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, 2, num_tokens, 8, generator=generator).to(torch.bfloat16)


def _make(max_blocks=12, max_unpacked_tokens=11, num_kept_blocks=1):
    return FullKV(
        SHAPE,
        max_blocks=max_blocks,
        max_unpacked_tokens=max_unpacked_tokens,
        num_kept_blocks=num_kept_blocks,
        layout=Layout.VEC,
    )


def _write(full, kv, token_position=None):
    for row in range(2):
        if token_position is None:
            full.prefill(row, kv[row, 0], kv[row, 1])
        else:
            full.write(row, token_position, kv[row, 0], kv[row, 1])


@given(
    st.integers(1, 23),
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 7)), max_size=5),
    st.integers(0, 2),
)
def test_every_token_is_read_back_as_it_was_written(num_context, rounds, num_kept_blocks):
    """UPL-6: through prefill, rejected writes and packing, the bytes of each token stay exact."""
    full = _make(max_unpacked_tokens=4 + 7, num_kept_blocks=num_kept_blocks)
    try:
        log = torch.zeros(2, 2, 2, 48, 8, dtype=torch.bfloat16)
        num_tokens = num_context
        log[:, :, :, :num_tokens] = _random(num_tokens, seed=0)
        _write(full, log[:, :, :, :num_tokens])
        for number, (num_new, num_kept) in enumerate(rounds):
            end = min(num_tokens + num_new, 48)
            log[:, :, :, num_tokens:end] = _random(end - num_tokens, seed=number + 1)
            if end > num_tokens:
                _write(full, log[:, :, :, num_tokens:end], num_tokens)
            num_tokens = min(num_tokens + num_kept, end)
            full.pack(num_tokens)
            for row in range(2):
                for length in {1, num_context, num_tokens, end}:
                    held = torch.stack(full.read(row, length))
                    assert torch.equal(held, log[row, :, :, :length])
                keys = sum(int(part.num_keys) for part in full.segments(row, end))
                assert keys == end
            first = max(num_tokens // 4 - num_kept_blocks, 0) * 4
            for begin in {first, num_tokens}:
                assert torch.equal(full.read_newest(begin, end), log[:, :, :, begin:end])
    finally:
        full.close()


def test_writes_that_do_not_fit_are_refused_and_change_nothing():
    full = _make(max_blocks=6, max_unpacked_tokens=5, num_kept_blocks=0)
    _write(full, _random(9, seed=1))
    before = [tensor.clone() for tensor in (full.packed, full.newest)]
    new = _random(4, seed=2)
    with pytest.raises(ValueError, match=r"unpacked tokens \[8, 16\) of row 0"):
        full.write(0, 7, new[0, 0], new[0, 1])
    with pytest.raises(ValueError, match="Pack confirmed tokens first"):
        full.write(0, 13, new[0, 0, :, :4], new[0, 1, :, :4])
    with pytest.raises(ValueError, match="capacity of 24 tokens"):
        full.write(1, 22, new[0, 0], new[0, 1])
    with pytest.raises(ValueError, match="holds tokens already"):
        full.prefill(0, new[0, 0], new[0, 1])
    with pytest.raises(ValueError, match="at least 8, the first"):
        full.read_newest(7, 9)
    for held, old in zip((full.packed, full.newest), before, strict=True):
        assert torch.equal(held, old)
    full.close()
    longer = _make(max_blocks=2)
    kv = _random(9, seed=3)
    with pytest.raises(ValueError, match="capacity of 8 tokens"):
        longer.prefill(0, kv[0, 0], kv[0, 1])
    longer.close()


@pytest.mark.parametrize("change", ["key", "value", "heads", "dim"])
def test_what_would_be_cast_or_spread_is_refused_before_anything_is_written(change):
    """UPL-6: another element type, or a shape that broadcasting would make fit."""
    full = _make()
    try:
        key, value = _random(6, seed=3)[0]
        _write(full, _random(6, seed=2))
        before = [full.packed.clone(), full.newest.clone()]
        wrong = {
            "key": (key.float(), value),
            "value": (key, value.half()),
            "heads": (key[:1], value[:1]),
            "dim": (key[..., :1], value[..., :1]),
        }[change]
        for write in (full.write, full.append):
            with pytest.raises(ValueError, match=r"expected torch.bfloat16 \[2, num_new, 8\]"):
                write(1, 6, *wrong)
        assert [full.packed.tolist(), full.newest.tolist()] == [each.tolist() for each in before]
        empty = _make()
        with pytest.raises(ValueError, match="Nothing is cast"):
            empty.prefill(0, *wrong)
        assert not empty.packed.any()
        assert not empty.newest.any()
        empty.close()
    finally:
        full.close()
