"""Small geometries and states for planning tests."""

import jax.numpy as jnp
import numpy as np

from blockcompact_jax.errors import Result, ResultCode, ok_result
from blockcompact_jax.geometry import GroupGeometry, LayerGeometry, LayerKind, ModelGeometry
from blockcompact_jax.ids import HOLE
from blockcompact_jax.residency import Residency, Revisions
from blockcompact_jax.selection import Selection, SelectionPolicy


def layer(layer_id, window=None, **changes):
    facts = {
        "layer": layer_id,
        "kind": LayerKind.FULL if window is None else LayerKind.SLIDING,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "window_tokens": window,
    }
    return LayerGeometry(**(facts | changes))


def geometry(groups=((0, 1, 2),), windows=None, block_tokens=4):
    """One geometry from a tuple of layer-ID tuples, one per group."""
    windows = windows or {}
    ids = sorted(layer_id for group in groups for layer_id in group)
    return ModelGeometry(
        layers=tuple(layer(i, windows.get(i)) for i in ids),
        groups=tuple(GroupGeometry(group=g, layers=ids) for g, ids in enumerate(groups)),
        block_tokens=block_tokens,
        dtype="bfloat16",
        layout="vec",
    )


def pad(rows, capacity):
    out = np.full((len(rows), capacity), HOLE, np.int32)
    for row, values in enumerate(rows):
        out[row, : len(values)] = values
    return out


def counts(rows):
    return np.asarray([len(values) for values in rows], np.int32)


def revisions(**values):
    names = ("request_epoch", "pool_generation", "map_revision", "selection_revision")
    return Revisions(**{name: jnp.int32(values.get(name, 0)) for name in names})


def residency(logical, physical=None, *, max_slots=8, block_tokens=4, **values):
    physical = logical if physical is None else physical
    return Residency(
        revisions=revisions(**values),
        logical_by_slot=pad(logical, max_slots),
        physical_by_slot=pad(physical, max_slots),
        num_valid=counts(logical),
        block_tokens=block_tokens,
    )


def selection(
    wants, tails=None, *, max_want=8, max_tail=8, max_blocks=16, num_candidates=None, block_tokens=4
):
    tails = [[] for _ in wants] if tails is None else tails
    return Selection(
        want=pad(wants, max_want),
        num_want=counts(wants),
        ranked_tail=pad(tails, max_tail),
        num_ranked_tail=counts(tails),
        effective_budget_blocks=counts(wants),
        num_candidate_blocks=jnp.int32(max_blocks if num_candidates is None else num_candidates),
        selection_revision=jnp.int32(1),
        result=ok_result(),
        policy=SelectionPolicy(max_want=max_want, max_tail=max_tail),
        block_tokens=block_tokens,
        max_blocks=max_blocks,
    )


def lists(array, num):
    return [
        list(map(int, row[:n])) for row, n in zip(np.asarray(array), np.asarray(num), strict=True)
    ]


def fault(result: Result):
    return ResultCode(int(result.code)), int(result.layer), int(result.block)
