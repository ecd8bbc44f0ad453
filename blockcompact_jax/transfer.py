"""A transfer as the runtime sees it: what surrounds it, what moves bytes, between which pools."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int32

from blockcompact_jax.ids import HOLE
from blockcompact_jax.kernels import RegisteredPool, host_pool_upload, raise_for_status
from blockcompact_jax.upload import SourceKind, UploadPlan

ROW_COLUMNS: Final = ("layer_row", "source_block", "physical_block", "valid_tokens")
"""What a transfer reads of each row of an upload plan."""

Rows = dict[str, Int32[np.ndarray, " upload_row"]]
"""The used rows of a transfer: `ROW_COLUMNS` by name."""

CheckLanded = Callable[[], None]
"""Raises unless all bytes of a transfer are where they belong, on every rank."""

Transaction = Callable[[UploadPlan, int], AbstractContextManager[CheckLanded]]
"""What surrounds a transfer: entered with the plan and the number of confirmed tokens before the
first byte moves; gives what is to be called before the new tables are published; left once they
are. An exception in it leaves the old state.
"""

Mover = Callable[[Rows], None]
"""What moves the bytes of a transfer. It returns when they are there, and raises if not all are."""


@dataclass(frozen=True, kw_only=True)
class Pools:
    """The stores of one request that a selection moves bytes between.

    Attributes:
        packed: packed CPU pool that transfers read. With SOURCE_ONLY its block b is source block b,
            which holds logical block b; with CPU_COPY it is the compaction area alone, and its
            block 0 is the first CPU destination block.
        resident: plain resident pool.
    """

    packed: RegisteredPool
    resident: RegisteredPool


def used_rows(upload: UploadPlan, *, first_copy_block: int = 0) -> Rows:
    """Returns the rows of a plan that are in use, as `Pools.packed` numbers its blocks.

    Args:
        upload: the plan.
        first_copy_block: first CPU destination block, with CPU_COPY.
    """
    is_used = np.asarray(upload.physical_block) != HOLE
    rows = {name: np.asarray(getattr(upload, name))[is_used] for name in ROW_COLUMNS}
    if upload.source_kind is SourceKind.CPU_COPY:
        copies = np.asarray(upload.cpu_destination_block)[is_used]
        rows["source_block"] = copies - np.int32(first_copy_block)
    return rows


def move_rows(pools: Pools, rows: Rows) -> None:
    """Moves the rows of a transfer on this thread.

    Args:
        pools: where from and where to.
        rows: the used rows.

    Raises:
        KernelStatusError: if a row is refused; no byte was moved then.
    """
    moved = host_pool_upload(
        pools.packed.current_ord(),
        pools.resident.current_ord(),
        *rows.values(),
        packed_pool=pools.packed,
        plain_pool=pools.resident,
    )
    raise_for_status(moved.status, call="pool_upload", **rows)
