"""Tables of a step against brute force: which tokens each row attends to, in which order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_bridge.vllm.requests import DecodingRequest
from torch_bridge.vllm.steps import build_tables

ROWS = ("whole", "selected", "prefill")


def tokens_attended(block_table, num_keys, physical_blocks, block_tokens):
    """Token positions behind a table, in its order."""
    logical_by_physical = {int(block): place for place, block in enumerate(physical_blocks)}
    tokens = []
    for key in range(num_keys):
        logical = logical_by_physical[int(block_table[key // block_tokens])]
        tokens.append(logical * block_tokens + key % block_tokens)
    return tokens


@given(
    data=st.data(),
    block_tokens=st.sampled_from([1, 2, 5]),
    num_layer_rows=st.integers(1, 3),
    kinds=st.lists(st.sampled_from(ROWS), min_size=1, max_size=5),
)
def test_every_row_attends_to_its_selection_and_everything_after_it(
    data, block_tokens, num_layer_rows, kinds
):
    max_blocks = 7
    free = iter(data.draw(st.permutations(range(1, 1 + max_blocks * len(kinds)))))
    table = np.full((len(kinds), max_blocks), -7, np.int32)
    lengths = np.zeros(len(kinds), np.int32)
    requests, expected = [], []
    for place, kind in enumerate(kinds):
        length = data.draw(st.integers(1, max_blocks * block_tokens))
        num_blocks = -(-length // block_tokens)
        lengths[place], table[place, :num_blocks] = length, [next(free) for _ in range(num_blocks)]
        everything = list(range(length))
        if kind == "prefill":
            requests.append(None)
            expected.append([everything] * num_layer_rows)
            continue
        request = DecodingRequest(physical_blocks=table[place, :num_blocks], num_tokens=length)
        requests.append(request)
        candidates = data.draw(st.integers(0, (length - 1) // block_tokens))
        if kind == "selected":
            count = data.draw(st.integers(0, candidates))
            chosen = [
                sorted(data.draw(st.permutations(range(candidates)))[:count])
                for _ in range(num_layer_rows)
            ]
            request.selected = np.array(chosen, np.int32).reshape(num_layer_rows, count)
            request.num_candidate_blocks = candidates
        if kind == "whole":
            expected.append([everything] * num_layer_rows)
        else:
            expected.append(
                [
                    [
                        token
                        for token in everything
                        if token // block_tokens in row or token >= candidates * block_tokens
                    ]
                    for row in chosen
                ]
            )

    tables = build_tables(
        requests,
        table,
        lengths,
        num_layer_rows=num_layer_rows,
        block_tokens=block_tokens,
    )

    assert tables.block_table.dtype == tables.num_keys.dtype == np.int32
    for place, rows in enumerate(expected):
        for row, tokens in enumerate(rows):
            entries = tables.block_table[row, place]
            num_keys = int(tables.num_keys[place])
            assert num_keys == len(tokens)
            assert tokens_attended(entries, num_keys, table[place], block_tokens) == tokens, (
                "ascending, so that the query's own token is the last"
            )
            assert not entries[-(-num_keys // block_tokens) :].any(), "unused entries are null"
