"""Selection by sorting Python lists."""

import math


def pyramid(budget: int, num_rows: int, percent: int) -> list[int]:
    """Linear offsets, mirrored, so that the sum stays."""
    if num_rows == 1:
        return [budget]
    out = []
    for row in range(num_rows):
        slope = num_rows - 1 - 2 * row
        size = budget * percent * abs(slope) // (100 * (num_rows - 1))
        out.append(budget + (size if slope > 0 else -size))
    return out


def rank(scores, num_candidates: int, sink: int) -> list[int]:
    """All candidates: sinks ascending, then by (-score, block)."""
    blocks = range(num_candidates)
    sinks = [b for b in blocks if b < sink]
    others = sorted((b for b in blocks if b >= sink), key=lambda b: (-float(scores[b]), b))
    return sinks + others


def select(scores, num_candidates, *, budgets, sink, recent, max_tail):
    """Returns (want, tail) lists per row for row budgets that are large enough."""
    wants, tails = [], []
    for row_scores, budget in zip(scores, budgets, strict=True):
        order = rank(row_scores, num_candidates, sink)
        count = min(max(budget, sink + recent) - recent, num_candidates)
        wants.append(order[:count])
        tails.append(order[count : count + max_tail])
    return wants, tails


def select_by_mass(scores, num_candidates, *, budget, sink, recent):
    """Returns want lists when all rows compete for the sum of their budgets."""
    count = min(max(budget, sink + recent) - recent, num_candidates)
    entries = [
        (0 if b < sink else 1, 0.0 if b < sink else -float(row_scores[b]), row, b)
        for row, row_scores in enumerate(scores)
        for b in range(num_candidates)
    ]
    chosen = sorted(entries)[: count * len(scores)]
    per_row = [sum(1 for entry in chosen if entry[2] == row) for row in range(len(scores))]
    orders = [rank(row_scores, num_candidates, sink) for row_scores in scores]
    return [order[:n] for order, n in zip(orders, per_row, strict=True)]


def first_non_finite(scores, num_candidates):
    """Returns the first (row, block) whose score is not finite, or None."""
    for row, row_scores in enumerate(scores):
        for block in range(num_candidates):
            if not math.isfinite(float(row_scores[block])):
                return row, block
    return None
