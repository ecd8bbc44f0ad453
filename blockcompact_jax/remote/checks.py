"""Refusals of messages that no request could mean."""

from __future__ import annotations

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.protocol import CompactionUpload

from .errors import Refusal, RemoteRefusedError


def check_rows(message: CompactionUpload, *, geometry: ModelGeometry, num_packed: int) -> None:
    """Refuses rows that no transfer of a request may have (UPL-7).

    Args:
        message: the upload.
        geometry: the model's.
        num_packed: whole confirmed blocks.

    Raises:
        RemoteRefusedError: naming the row and what was expected.
    """
    if message.source_kind.value != "source_only":
        raise RemoteRefusedError(
            Refusal.BAD_MESSAGE, "`source_kind` is not source_only; nothing is copied here."
        )
    layers = {layer: geometry.layers[layer] for layer in geometry.full_layers}
    seen: set[tuple[int, int]] = set()
    for row in message.rows:
        place = row.layer, row.physical_block
        if (
            row.layer not in layers
            or not 0 <= row.source_block < num_packed
            or row.source_block != row.logical_block
            or row.valid_tokens != geometry.block_tokens
            or place in seen
        ):
            raise RemoteRefusedError(
                Refusal.BAD_MESSAGE,
                f"`rows` has {row}; expected a full-attention layer, a source block below "
                f"{num_packed} that equals the logical block, {geometry.block_tokens} valid "
                "tokens, and no destination twice.",
            )
        seen.add(place)


def check_tokens(token_ids: tuple[int, ...], num_vocabulary: int) -> None:
    """Refuses token IDs that the model does not have."""
    if max(token_ids) >= num_vocabulary:
        raise RemoteRefusedError(
            Refusal.BAD_MESSAGE,
            f"`token_ids` has {max(token_ids)}; expected IDs below {num_vocabulary}.",
        )
