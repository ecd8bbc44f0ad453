"""Ranking and ID lists by Python lists and sorts; imports nothing of the code under test."""

import math

import numpy as np


def padded(lists, capacity):
    out = np.full((len(lists), capacity), -1, np.int32)
    for row, values in enumerate(lists):
        out[row, : len(values)] = values
    return out


def rank(scores, count, num_candidates, num_sinks, capacity):
    """Python floats hold float32 exactly, and order denormals and both zeros as asked."""
    lists, bad = [], []
    for row, wanted in zip(scores, count, strict=True):
        values = [float(value) for value in row[: int(num_candidates)]]
        faulty = [block for block, value in enumerate(values) if not math.isfinite(value)]
        bad.append(faulty[0] if faulty else -1)
        keys = [(b >= num_sinks, -v if b >= num_sinks else 0, b) for b, v in enumerate(values)]
        order = [] if faulty else [block for *_, block in sorted(keys)]
        lists.append(order[: max(min(int(wanted), capacity), 0)])
    return padded(lists, capacity), np.asarray(bad, np.int32)


def find_members(ids, others, max_ids):
    def first_repeat(row):
        row = row.tolist()
        for place, value in enumerate(row):
            if 0 <= value < max_ids and value in row[place + 1 :]:
                return place
        return -1

    has = [
        [0 <= value < max_ids and value in other for value in row.tolist()]
        for row, other in zip(ids, (set(row.tolist()) for row in others), strict=True)
    ]
    repeats = [np.asarray([first_repeat(row) for row in rows], np.int32) for rows in (ids, others)]
    return np.asarray(has, bool), *repeats


def sort_ids(ids, max_ids, capacity):
    kept = [sorted(v for v in row.tolist() if 0 <= v < max_ids)[:capacity] for row in ids]
    return padded(kept, capacity)
