"""Retention with Python lists."""


def retain(helds, tables, wants, groups, *, layer_tables, union):
    """Returns per group kind name, and per row kept slots, table and moves.

    Args:
        helds: Logical blocks in slot order, per row.
        tables: Physical blocks in slot order, per row.
        wants: Wanted blocks per row.
        groups: Group of each row.
        layer_tables: Whether the engine reads one table per layer.
        union: Whether a union is allowed.
    """
    keeps = [
        [slot for slot, block in enumerate(held) if block in want]
        for held, want in zip(helds, wants, strict=True)
    ]
    kinds = {}
    for group in sorted(set(groups)):
        rows = [r for r, g in enumerate(groups) if g == group]
        if _shareable(keeps, tables, rows):
            kinds[group] = "SHARED_TABLE"
        elif layer_tables:
            kinds[group] = "LAYER_TABLES"
        else:
            kinds[group] = "BYTE_MOVE"
            merged = sorted({slot for r in rows for slot in keeps[r]})
            candidate = list(keeps)
            for r in rows:
                candidate[r] = merged
            same_length = len({len(helds[r]) for r in rows}) == 1
            fits = all(slot < len(helds[r]) for r in rows for slot in merged)
            if union and same_length and fits and _shareable(candidate, tables, rows):
                kinds[group] = "UNION"
                keeps = candidate
    new_tables, moves = [], []
    for row, keep in enumerate(keeps):
        table = tables[row]
        if kinds[groups[row]] == "BYTE_MOVE":
            new_tables.append(table[: len(keep)])
            moves.append([(table[s], table[j]) for j, s in enumerate(keep) if s != j])
        else:
            new_tables.append([table[s] for s in keep])
            moves.append([])
    logical = [[helds[r][s] for s in keep] for r, keep in enumerate(keeps)]
    return {
        "kinds": kinds,
        "keeps": keeps,
        "tables": new_tables,
        "moves": moves,
        "logical": logical,
    }


def _shareable(keeps, tables, rows):
    first = rows[0]
    return all(
        keeps[r] == keeps[first]
        and [tables[r][s] for s in keeps[r]] == [tables[first][s] for s in keeps[first]]
        for r in rows
    )
