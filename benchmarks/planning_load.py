"""Whether other processes took processor time while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

MAX_OTHER_CPUS = 0.1
"""Processors that others may use, on average, before a machine counts as shared."""

_STAT = Path("/proc/stat")
_IDLE_COLUMNS = (3, 4)  # idle, iowait
_GUEST_COLUMNS = (8, 9)  # counted in user time already


class Others:
    """The processor time of all other processes since this was made."""

    def __init__(self) -> None:
        self.start = _read()

    def were_running(self) -> bool | None:
        """Whether they took more than `MAX_OTHER_CPUS`; None where the system does not tell."""
        now = _read()
        if self.start is None or now is None:
            return None
        elapsed_s, busy_s, own_s = (
            after - before for before, after in zip(self.start, now, strict=True)
        )
        return busy_s - own_s > MAX_OTHER_CPUS * elapsed_s


def _read() -> tuple[float, float, float] | None:
    """Wall, busy and own seconds: the busy ones of all processors and processes."""
    if not _STAT.exists():
        return None
    columns = [int(value) for value in _STAT.read_text().splitlines()[0].split()[1:]]
    skipped = (*_IDLE_COLUMNS, *_GUEST_COLUMNS)
    busy = sum(value for place, value in enumerate(columns) if place not in skipped)
    return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()
