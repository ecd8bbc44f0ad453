"""Estimated attention mass against the formula, for keys that come in any pieces."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_bridge.key_moments import KeyMoments

ROWS, KV_HEADS, GROUP, DIM, MAX_TOKENS = 2, 2, 3, 8, 90


def expected_mass(query, key, part_tokens, block_tokens, scale):
    """Of one layer, in float64, head by head and part by part."""
    rows = []
    for head in range(KV_HEADS * GROUP):
        logits = []
        for part in key[head // GROUP].double().split(part_tokens):
            q = query[head].double() * scale
            mean = part.mean(0)
            variance = ((part - mean) ** 2).mean(0)
            logits.append((q * mean + q * q * variance / 2).sum() + math.log(len(part)))
        mass = torch.stack(logits).softmax(0)
        rows.append(torch.stack([m.sum() for m in mass.split(block_tokens // part_tokens)]))
    return torch.stack(rows)


@given(
    pieces=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    part_tokens=st.sampled_from([1, 4, 5]),
    parts_per_block=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_mass_is_that_of_the_formula_in_whatever_pieces_keys_come(
    pieces, part_tokens, parts_per_block, dtype, seed
):
    draw = torch.Generator().manual_seed(seed)
    num_tokens = min(sum(pieces), MAX_TOKENS)
    key = torch.randn(ROWS, KV_HEADS, num_tokens, DIM, generator=draw).to(dtype)
    query = torch.randn(KV_HEADS * GROUP, DIM, generator=draw).to(dtype)
    moments = KeyMoments(
        num_rows=ROWS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        max_tokens=MAX_TOKENS,
        part_tokens=part_tokens,
    )
    begin = 0
    for size in pieces:
        for row in range(ROWS):
            moments.add(row, begin, key[row, :, begin : begin + size])
        begin = min(begin + size, num_tokens)
        if begin == num_tokens:
            break
    block_tokens = part_tokens * parts_per_block
    for row in range(ROWS):
        found = moments.mass(
            row, query, num_tokens=num_tokens, block_tokens=block_tokens, scale=0.5
        )
        expected = expected_mass(query, key[row], part_tokens, block_tokens, 0.5)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_equal_keys_are_estimated_without_error():
    key = torch.arange(1.0, 5.0).repeat_interleave(4)[None, :, None].expand(1, 16, DIM)
    moments = KeyMoments(num_rows=1, num_kv_heads=1, head_dim=DIM, max_tokens=16, part_tokens=4)
    moments.add(0, 0, key)
    query = torch.full((1, DIM), 0.25)
    found = moments.mass(0, query, num_tokens=16, block_tokens=8, scale=1.0)
    weights = (query @ key[0].T).softmax(1)
    torch.testing.assert_close(found, weights.unflatten(1, (2, 8)).sum(2))
