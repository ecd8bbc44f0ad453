"""Which KV heads belong to which rank."""

from __future__ import annotations

from dataclasses import dataclass

from blockcompact_jax.errors import CompactionError


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """The KV heads of one rank.

    Attributes:
        rank: Tensor-parallel rank.
        first_kv_head: Its first KV head.
        num_kv_heads: How many it has; they are neighbours.
    """

    rank: int
    first_kv_head: int
    num_kv_heads: int


def share_heads(num_kv_heads: int, num_ranks: int) -> tuple[HeadShare, ...]:
    """Splits the KV heads over ranks, as evenly as they go; the first ranks get one more.

    Args:
        num_kv_heads: KV heads of every layer.
        num_ranks: Ranks; each gets at least one head.

    Raises:
        CompactionError: There are more ranks than heads, or none.
    """
    if not 1 <= num_ranks <= num_kv_heads:
        raise CompactionError(
            f"`ranks` is {num_ranks} for {num_kv_heads} KV heads; expected 1 to {num_kv_heads}: "
            "every rank holds at least one KV head."
        )
    smallest, num_larger = divmod(num_kv_heads, num_ranks)
    shares: list[HeadShare] = []
    first = 0
    for rank in range(num_ranks):
        count = smallest + (rank < num_larger)
        shares.append(HeadShare(rank=rank, first_kv_head=first, num_kv_heads=count))
        first += count
    return tuple(shares)
