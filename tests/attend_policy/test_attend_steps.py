"""Tables of a step against brute force: which tokens each row attends to, in which order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_bridge.vllm.requests import DecodingRequest
from torch_bridge.vllm.steps import TableKeeper, build_tables

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


@given(seed=st.integers(0, 2**32 - 1), block_tokens=st.sampled_from([1, 3]))
def test_kept_tables_are_those_of_each_step_alone(seed, block_tokens):
    """Requests grow, select anew, lose their selection, join and leave."""
    rng, rows = np.random.default_rng(seed), 2
    keeper = TableKeeper(num_layer_rows=rows, block_tokens=block_tokens)
    free = iter(rng.permutation(np.arange(1, 4000)).tolist())
    requests = []
    for _ in range(25):
        if not requests or (len(requests) < 4 and rng.random() < 0.3):
            requests.append(DecodingRequest(physical_blocks=np.zeros(0, np.int32), num_tokens=0))
        elif len(requests) > 1 and rng.random() < 0.1:
            requests.pop(int(rng.integers(len(requests))))
        for request in requests:
            request.num_tokens += int(rng.integers(1, 3))
            num_new = -(-request.num_tokens // block_tokens) - request.physical_blocks.size
            new = np.array([next(free) for _ in range(num_new)], np.int32)
            request.physical_blocks = np.concatenate([request.physical_blocks, new])
            if rng.random() < 0.3:
                request.num_candidate_blocks = int(rng.integers(request.physical_blocks.size))
                count = int(rng.integers(request.num_candidate_blocks + 1))
                chosen = [
                    rng.permutation(request.num_candidate_blocks)[:count] for _ in range(rows)
                ]
                request.selected = np.sort(chosen, axis=1).astype(np.int32).reshape(rows, count)
            elif rng.random() < 0.1:
                request.selected = None
        table = np.full((len(requests), 60), -7, np.int32)
        for place, request in enumerate(requests):
            table[place, : request.physical_blocks.size] = request.physical_blocks
        num_tokens = np.array([request.num_tokens for request in requests], np.int32)
        shown = [None if rng.random() < 0.1 else request for request in requests]
        kept = keeper.build(shown, table, num_tokens)
        alone = build_tables(
            shown, table, num_tokens, num_layer_rows=rows, block_tokens=block_tokens
        )
        np.testing.assert_array_equal(kept.num_keys, alone.num_keys)
        for place, num_keys in enumerate(alone.num_keys):
            used = -(-int(num_keys) // block_tokens)
            np.testing.assert_array_equal(
                kept.block_table[:, place, :used], alone.block_table[:, place, :used]
            )
            assert not kept.block_table[:, place, used:].any()


def test_a_step_in_which_no_table_changes_writes_none():
    request = DecodingRequest(physical_blocks=np.arange(5, 11, dtype=np.int32), num_tokens=21)
    request.selected, request.num_candidate_blocks = np.array([[0, 2]], np.int32), 4
    keeper = TableKeeper(num_layer_rows=1, block_tokens=4)
    table = request.physical_blocks[None]
    first = keeper.build([request], table, np.array([21], np.int32))
    first.block_table[:] = -1  # would be overwritten
    second = keeper.build([request], table, np.array([22], np.int32))
    assert second.block_table is first.block_table
    assert (second.block_table == -1).all()
    assert second.num_keys.tolist() == [14]
    request.selected = request.selected.copy()  # a new selection, though of the same blocks
    third = keeper.build([request], table, np.array([23], np.int32))
    assert third.block_table[0, 0, :4].tolist() == [5, 7, 9, 10]
