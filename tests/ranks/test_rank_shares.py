"""KV heads over ranks: all of them, each once, as evenly as they go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.ranks.shares import share_heads


@given(st.integers(1, 64), st.data())
def test_every_head_belongs_to_one_rank(num_kv_heads, data):
    num_ranks = data.draw(st.integers(1, num_kv_heads))
    shares = share_heads(num_kv_heads, num_ranks)
    heads = [
        head
        for share in shares
        for head in range(share.first_kv_head, share.first_kv_head + share.num_kv_heads)
    ]
    assert heads == list(range(num_kv_heads))
    assert [share.rank for share in shares] == list(range(num_ranks))
    sizes = [share.num_kv_heads for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_ranks", [0, -1, 4])
def test_an_impossible_number_of_ranks_is_refused(num_ranks):
    with pytest.raises(CompactionError, match=rf"`ranks` is {num_ranks} for 3 KV heads"):
        share_heads(3, num_ranks)
