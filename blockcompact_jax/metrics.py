"""What a run costs, each cost under its own name.

A zero in one counter says nothing about another: removing the CPU gather and removing the resident
byte move are two results, and neither makes scores or uploads cheaper.
"""

import dataclasses
from dataclasses import dataclass

from .errors import CompactionError


@dataclass(frozen=True, kw_only=True)
class CompactionMetrics:
    """Counters of one or more steps; add them up with `add`.

    A time that nobody measured is None, never 0, and stays None in a sum.

    Attributes:
        cpu_gather_bytes: Bytes gathered into the CPU compaction area (copy path).
        cpu_destination_blocks: CPU compaction-area blocks used (copy path).
        h2d_bytes: Bytes moved from the CPU pool to the accelerator.
        unpack_bytes: Bytes unpacked from the packed layout.
        scatter_bytes: Bytes written into pool blocks.
        resident_move_bytes: Bytes moved within the pool by a retention.
        table_entries_written: Block-table entries rewritten.
        metadata_elements: Integers sent or stored to describe plans.
        physical_blocks_released: Pool blocks freed, measured from reference counts.
        plan_us: Planning time in microseconds.
        table_us: Table rewriting time.
        metadata_us: Metadata exchange time.
        wait_us: Time spent waiting for readers, transfers and ranks.
        allocator_us: Reservation and release time.
        move_us: Time of byte moves within the pool.
    """

    cpu_gather_bytes: int = 0
    cpu_destination_blocks: int = 0
    h2d_bytes: int = 0
    unpack_bytes: int = 0
    scatter_bytes: int = 0
    resident_move_bytes: int = 0
    table_entries_written: int = 0
    metadata_elements: int = 0
    physical_blocks_released: int = 0
    plan_us: float | None = None
    table_us: float | None = None
    metadata_us: float | None = None
    wait_us: float | None = None
    allocator_us: float | None = None
    move_us: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if value is not None and value < 0:
                raise CompactionError(f"`{name}` is {value}; a cost is at least 0.")

    def add(self, other: "CompactionMetrics") -> "CompactionMetrics":
        """Returns the sum, name by name; a time is unmeasured where either is."""
        mine, theirs = self.to_dict(), other.to_dict()
        total = {name: _sum(mine[name], theirs[name]) for name in mine}
        return CompactionMetrics(**total)  # pyright: ignore[reportArgumentType]

    def to_dict(self) -> dict[str, int | float | None]:
        """Returns every counter by name."""
        return dataclasses.asdict(self)


def _sum(left: int | float | None, right: int | float | None) -> int | float | None:
    return None if left is None or right is None else left + right
