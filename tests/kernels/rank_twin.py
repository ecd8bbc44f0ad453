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


def find_members(ids, is_filled, others, is_other_filled, bound, max_ids):  # noqa: PLR0917
    """Lists of (place, ID) at filled places, compared in pairs."""

    def filled(rows, mask):
        return [
            [(place, value) for place, value in enumerate(row.tolist()) if mask_row[place]]
            for row, mask_row in zip(rows, mask, strict=True)
        ]

    def first(row, is_faulty):
        return next((place for place, value in row if is_faulty(place, value)), -1)

    def repeats(row):
        return lambda place, value: (
            0 <= value < max_ids and any(v == value and p > place for p, v in row)
        )

    def is_outside(_, value):
        return not 0 <= value < bound

    has = np.zeros(ids.shape, bool)
    mine, theirs = filled(ids, is_filled), filled(others, is_other_filled)
    for row, (listed, other) in enumerate(zip(mine, theirs, strict=True)):
        known = {value for _, value in other}
        for place, value in listed:
            has[row, place] = 0 <= value < max_ids and value in known
    lists = (mine, theirs)
    repeated = [[first(row, repeats(row)) for row in rows] for rows in lists]
    outside = [[first(row, is_outside) for row in rows] for rows in lists]
    return has, *(np.asarray(places, np.int32) for places in (*repeated, *outside))


def sort_ids(ids, is_filled, max_ids, capacity):
    kept = [
        sorted(v for v in row[mask].tolist() if 0 <= v < max_ids)[:capacity]
        for row, mask in zip(ids, is_filled, strict=True)
    ]
    return padded(kept, capacity)


def list_free(references, capacity):
    is_free = (references == 0).all(0)
    free = [np.flatnonzero(row).tolist() for row in is_free]
    counts = np.asarray([len(row) for row in free], np.int32)
    return padded([row[:capacity] for row in free], capacity), counts
