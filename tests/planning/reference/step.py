"""A whole step with Python lists: the arrays of its plan, and the state after its commit."""

import itertools

import numpy as np

from . import diff as ref_diff
from . import retain as ref_retain
from . import select as ref_select

REGULAR, TRANSFER = 0, 2


def plan(case, facts):
    """Returns every array of a fault-free plan, by its path in the plan.

    Args:
        case: `scores` [row][block], `num_candidates`, `budgets`, `helds` and `tables` per row,
            `references` [kind, owner, physical], `generation` [owner, physical], `revisions`
            (epoch, generation, map, selection), `sources`, `first_copy`, `force_full`.
        facts: `layers`, `groups`, `owners` (place of each row's owner) and `group_places` per row;
            `sink`, `recent`, `max_want`, `max_tail`, `max_upload`, `common`, `is_copy`,
            `block_tokens`.
    """
    max_upload = facts["max_upload"]
    wants, tails = ref_select.select(
        case["scores"],
        case["num_candidates"],
        budgets=case["budgets"],
        sink=facts["sink"],
        recent=facts["recent"],
        max_tail=facts["max_tail"],
    )
    delta = ref_diff.delta(
        wants,
        tails,
        case["helds"],
        facts["group_places"],
        common=facts["common"],
        force_full=case["force_full"],
    )
    uploads = delta["uploads"]
    places = range(max(facts["group_places"]) + 1)
    longest = [
        max(len(u) for u, g in zip(uploads, facts["group_places"], strict=True) if g == place)
        for place in places
    ]
    reserved = _lowest_free(case, facts, uploads)
    selection = case["revisions"][3]
    names = ("request_epoch", "pool_generation", "map_revision")
    basis = dict(zip(names, case["revisions"], strict=False)) | {
        "selection_revision": selection + 1
    }
    minimum = facts["sink"] + facts["recent"]
    ok = {"result.code": 0, "result.layer": -1, "result.block": -1}
    out = {
        "selection.want": _pad(wants, facts["max_want"]),
        "selection.num_want": [len(w) for w in wants],
        "selection.ranked_tail": _pad(tails, facts["max_tail"]),
        "selection.num_ranked_tail": [len(t) for t in tails],
        "selection.effective_budget_blocks": [max(x, minimum) for x in case["budgets"]],
        "selection.num_candidate_blocks": case["num_candidates"],
        "selection.selection_revision": selection + 1,
        "diff.upload_logical_blocks": _pad(uploads, max_upload),
        "diff.num_upload": [len(u) for u in uploads],
        "diff.common_new_slots": longest,
        "reserved": _pad(reserved, max_upload),
        "reserved_generation": _pad(
            [[case["generation"][o][x] for x in row] for o, row in enumerate(reserved)], max_upload
        ),
    }
    out |= {f"diff.{name}": delta[name] for name in ("num_new", "num_pad", "num_truncated")}
    out |= {f"{part}.basis.{name}": v for part in ("diff", "upload") for name, v in basis.items()}
    out |= {
        f"{part}{name}": v
        for part in ("selection.", "diff.", "upload.", "")
        for name, v in ok.items()
    }
    rows = _upload_rows(case, facts, uploads, reserved)
    out |= {f"upload.{name}": [row[name] for row in rows] for name in rows[0]}
    out["upload.num_rows"] = sum(len(u) for u in uploads)
    arrays = {name: np.asarray(value, np.int32) for name, value in out.items()}
    return arrays | {"diff.is_full": np.asarray(delta["is_full"])}


def commit(case, facts, *, layer_tables):
    """Returns held lists, tables, group kinds and reference counts after the plan's commit."""
    planned = plan(case, facts)
    is_full = bool(planned["diff.is_full"])
    uploads = _lists(planned["diff.upload_logical_blocks"])
    reserved = _lists(planned["reserved"])
    helds, tables = [], []
    for row, upload in enumerate(uploads):
        targets = reserved[facts["owners"][row]][: len(upload)]
        helds.append(([] if is_full else case["helds"][row]) + upload)
        tables.append(([] if is_full else case["tables"][row]) + targets)
    kept = ref_retain.retain(
        helds,
        tables,
        _lists(planned["selection.want"]),
        facts["group_places"],
        layer_tables=layer_tables,
        union=False,
    )
    references = np.array(case["references"])
    before, after = (
        {(o, x) for o, t in zip(facts["owners"], side, strict=True) for x in t}
        for side in (case["tables"], kept["tables"])
    )
    for owner, block in after - before:
        references[REGULAR, owner, block] += 1
    for owner, block in before - after:
        references[REGULAR, owner, block] -= 1
    return kept, references


def _lowest_free(case, facts, uploads):
    reserved = []
    for owner in range(max(facts["owners"]) + 1):
        number = max(len(u) for u, o in zip(uploads, facts["owners"], strict=True) if o == owner)
        counts = case["references"][:, owner].sum(0)
        reserved.append([x for x, count in enumerate(counts) if count == 0][:number])
    return reserved


def _upload_rows(case, facts, uploads, reserved):
    rows = []
    copies = itertools.count(case["first_copy"])
    for row, upload in enumerate(uploads):
        for place in range(facts["max_upload"]):
            if place >= len(upload):
                rows.append(_unused_row())
                continue
            block = upload[place]
            rows.append(
                {
                    "layer": facts["layers"][row],
                    "layer_row": row,
                    "group": facts["groups"][row],
                    "logical_block": block,
                    "source_block": case["sources"][block],
                    "cpu_destination_block": next(copies) if facts["is_copy"] else -1,
                    "physical_block": reserved[facts["owners"][row]][place],
                    "valid_tokens": facts["block_tokens"],
                }
            )
    return rows


def _unused_row():
    names = ("layer", "layer_row", "group", "logical_block", "source_block")
    names += ("cpu_destination_block", "physical_block")
    return dict.fromkeys(names, -1) | {"valid_tokens": 0}


def _pad(rows, capacity):
    return [list(row) + [-1] * (capacity - len(row)) for row in rows]


def _lists(array):
    return [[x for x in row if x != -1] for row in array.tolist()]
