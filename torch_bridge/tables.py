"""Block tables at fixed addresses, changed only while nobody reads them.

What was captured once and is replayed (a CUDA graph, a compiled call over registered memory) keeps
the address of a table, not its entries. So a table must not move, and its entries may change only
at a safe point: when no replay is running.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
from jaxtyping import Int32

from blockcompact_jax.ids import HOLE


class TablesBusyError(RuntimeError):
    """The tables were to change while a replay reads them. Nothing has changed."""


class BlockTables:
    """One block table a row, in buffers that stay where they are.

    Attributes:
        physical_blocks: int32 [row, max_entries], HOLE behind the entries of a row. Its memory is
            the same for life.
        num_entries: int32 [row]; likewise.
        revision: swaps so far.
    """

    def __init__(self, num_rows: int, max_entries: int) -> None:
        """Allocates empty tables."""
        self.physical_blocks = np.full((num_rows, max_entries), HOLE, np.int32)
        self.num_entries = np.zeros(num_rows, np.int32)
        self.revision = 0
        self._num_readers = 0
        self._condition = threading.Condition()

    def row(self, row: int) -> Int32[np.ndarray, " entries"]:
        """The entries of one row, as a view."""
        return self.physical_blocks[row, : self.num_entries[row]]

    @contextmanager
    def reading(self) -> Generator[None]:
        """Surrounds a replay: until it ends no table changes."""
        with self._condition:
            self._num_readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_readers -= 1
                self._condition.notify_all()

    def swap(
        self,
        physical_blocks: Sequence[Int32[np.ndarray, " entries"]],
        *,
        wait_seconds: float = 0.0,
    ) -> int:
        """Replaces the entries of every row in place, at a safe point.

        Args:
            physical_blocks: the new table of each row.
            wait_seconds: how long to wait for replays to end.

        Returns:
            Entries written.

        Raises:
            TablesBusyError: if a replay still runs then.
            ValueError: if rows are missing, or a table is longer than its buffer or not of int32.
        """
        for row, table in enumerate(physical_blocks):
            if np.ndim(table) != 1 or table.dtype != np.int32:
                raise ValueError(
                    f"`physical_blocks` has {table.dtype} {np.shape(table)} for row {row}; "
                    "expected int32 [entries]. Nothing has changed."
                )
        num_rows, max_entries = self.physical_blocks.shape
        longest = max((len(table) for table in physical_blocks), default=0)
        if len(physical_blocks) != num_rows or longest > max_entries:
            raise ValueError(
                f"`physical_blocks` has {len(physical_blocks)} tables of up to {longest} entries; "
                f"expected {num_rows} of at most {max_entries}."
            )
        with self._condition:
            if not self._condition.wait_for(lambda: self._num_readers == 0, wait_seconds):
                raise TablesBusyError(
                    f"{self._num_readers} replays read the tables; swap them when those have "
                    "ended, or wait longer."
                )
            for row, table in enumerate(physical_blocks):
                self.physical_blocks[row, : len(table)] = table
                self.physical_blocks[row, len(table) :] = HOLE
                self.num_entries[row] = len(table)
            self.revision += 1
        return int(self.num_entries.sum())
