"""Set difference with Python sets."""


def delta(wants, tails, helds, groups, *, common, force_full=False):
    """Returns per-row uploads and counts, and whether the plan is full; None if padding fails."""
    fresh = [[b for b in want if b not in held] for want, held in zip(wants, helds, strict=True)]
    spare = [[b for b in tail if b not in held] for tail, held in zip(tails, helds, strict=True)]
    tried = _pad(fresh, spare, groups, common)
    is_full = force_full or tried is None
    truncated = [0] * len(wants)
    if common:
        for row, group in enumerate(groups):
            members = [r for r, g in enumerate(groups) if g == group]
            shortest = min(len(fresh[r]) + len(spare[r]) for r in members)
            truncated[row] = max(0, len(fresh[row]) - shortest)
    if is_full:
        fresh = [list(want) for want in wants]
        tried = _pad(fresh, [list(tail) for tail in tails], groups, common)
        if tried is None:
            return None
    pads = tried
    uploads = [sorted(new + pad) for new, pad in zip(fresh, pads, strict=True)]
    return {
        "is_full": is_full,
        "uploads": uploads,
        "num_new": [len(new) for new in fresh],
        "num_pad": [len(pad) for pad in pads],
        "num_truncated": truncated,
    }


def _pad(fresh, spare, groups, common):
    if not common:
        return [[] for _ in fresh]
    pads = []
    for row, group in enumerate(groups):
        longest = max(len(fresh[r]) for r, g in enumerate(groups) if g == group)
        missing = longest - len(fresh[row])
        if missing > len(spare[row]):
            return None
        pads.append(spare[row][:missing])
    return pads
