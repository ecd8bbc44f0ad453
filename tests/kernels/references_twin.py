"""Kept places, marks and reference counts by plain loops; imports nothing of the code tested."""

import numpy as np

from .rank_twin import padded


def keep_places(is_kept, first, second):
    kept = [[place for place, keeps in enumerate(row) if keeps] for row in is_kept.tolist()]
    columns = [
        [[int(row[place]) for place in places] for row, places in zip(column, kept, strict=True)]
        for column in (first, second)
    ]
    return tuple(padded(lists, is_kept.shape[1]) for lists in (kept, *columns))


def mark_ids(ids, num_filled, owners, num_owners, max_ids):
    marked = np.zeros((num_owners, max_ids), bool)
    for row, count, owner in zip(ids.tolist(), num_filled.tolist(), owners.tolist(), strict=True):
        for value in row[: max(count, 0)]:
            if 0 <= value < max_ids:
                marked[owner, value] = True
    return marked


def move_references(counts, landing, tables):
    """Kind 0 is regular, kind 2 transfer; returns the counts, what is freed, and first faults."""
    (references, generation), (landed, landed_generation), (before, after) = counts, landing, tables
    _, num_owners, num_blocks = references.shape
    moved, released = references.copy(), np.zeros(generation.shape, bool)
    retired, faults = np.zeros(num_owners, np.int32), np.full((num_owners, 6), -1, np.int32)
    for owner in range(num_owners):
        places = list(zip(landed[owner].tolist(), landed_generation[owner].tolist(), strict=True))
        inside = [block for block, _ in places if 0 <= block < num_blocks]
        found = {
            0: [b for b, _ in places if b != -1 and not 0 <= b < num_blocks],
            1: [b for b in range(num_blocks) if inside.count(b) > 1],
            2: [b for b, g in places if 0 <= b < num_blocks and generation[owner, b] != g],
            3: [b for b in range(num_blocks) if inside.count(b) > references[2, owner, b]],
            4: [],
            5: [],
        }
        for block in range(num_blocks):
            moved[2, owner, block] -= inside.count(block)
            gains = after[owner, block] and not before[owner, block]
            loses = before[owner, block] and not after[owner, block]
            moved[0, owner, block] += int(gains) - int(loses)
            retired[owner] += loses
            if gains and block not in inside:
                found[4].append(block)
            if loses and references[0, owner, block] == 0:
                found[5].append(block)
            had = any(references[:, owner, block])
            released[owner, block] = had and not any(moved[:, owner, block])
        for check, blocks in found.items():
            faults[owner, check] = blocks[0] if blocks else -1
    return moved, released, retired, faults
