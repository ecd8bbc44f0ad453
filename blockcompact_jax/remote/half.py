"""What a server asks of the half with the model. It is given to it; nothing here imports one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.protocol import Capabilities

from .segment import SharedSegment


class VerifierHalf(Protocol):
    """The full KV of one request and the model that writes it."""

    def prefill(self, token_ids: tuple[int, ...]) -> None:
        """Verifies the context; logits and mass go to shared memory."""
        ...

    def verify(self, token_ids: tuple[int, ...], *, is_scoring: bool) -> None:
        """Verifies tokens after the confirmed ones; logits and mass go to shared memory."""
        ...

    def confirm(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens and packs their whole blocks."""
        ...

    def gather(
        self, layers: Sequence[int], source_blocks: Sequence[int], copy_blocks: Sequence[int]
    ) -> None:
        """Copies packed blocks into the compaction area, whose first block is 0 here."""
        ...

    def close(self) -> None:
        """Releases everything."""
        ...


class VerifierEngine(Protocol):
    """The model, loaded once for all requests."""

    @property
    def geometry(self) -> ModelGeometry:
        """Layers, groups, block size."""
        ...

    @property
    def num_vocabulary(self) -> int:
        """Token IDs are below this."""
        ...

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        ...

    def capabilities(self, process_epoch: int) -> Capabilities:
        """What this side says of itself."""
        ...

    def open(
        self,
        segment: SharedSegment,
        *,
        max_tokens: int,
        num_draft_tokens: int,
        num_copy_blocks: int,
    ) -> VerifierHalf:
        """Allocates a request's stores in a segment."""
        ...
