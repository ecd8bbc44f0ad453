"""Refusals of messages that no request could mean."""

from __future__ import annotations

import numpy as np

from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.ids import HOLE
from blockcompact_jax.protocol import CompactionUpload, CpuPoolArea, Prefill
from blockcompact_jax.upload import SourceKind

from .errors import Refusal, RemoteRefusedError


def check_rows(
    message: CompactionUpload, *, geometry: ModelGeometry, num_packed: int, area: CpuPoolArea
) -> None:
    """Refuses rows that no transfer of a request may have (UPL-7).

    Args:
        message: the upload.
        geometry: the model's.
        num_packed: whole confirmed blocks.
        area: the request's source blocks and its compaction area.

    Raises:
        RemoteRefusedError: naming the row and what was expected.
    """
    is_copy = message.source_kind is SourceKind.CPU_COPY
    if is_copy and area.is_empty:
        raise RemoteRefusedError(
            Refusal.BAD_MESSAGE,
            "`source_kind` is cpu_copy, but this request has no compaction area; give "
            "`num_copy_blocks` with its prefill, or read the sources in place.",
        )
    rows = {name: np.asarray(column, np.int64) for name, column in vars(message.rows).items()}
    copy_block = rows["cpu_destination_block"]
    copies = range(area.num_source_blocks, area.num_cpu_blocks) if is_copy else range(HOLE, 0)
    places = np.searchsorted(geometry.layer_by_row, rows["layer"])
    groups = np.append(geometry.group_by_row, HOLE)  # One place more, for layers beyond the last.
    is_wrong = (
        ~np.isin(rows["layer"], geometry.full_layers)
        | (rows["group"] != groups[places])
        | (rows["source_block"] < 0)
        | (rows["source_block"] >= num_packed)
        | (rows["source_block"] != rows["logical_block"])
        | (rows["valid_tokens"] != geometry.block_tokens)
        | (copy_block < copies.start)
        | (copy_block >= copies.stop)
        | _is_repeated(rows["layer"], rows["physical_block"])
    )
    if is_copy:
        is_wrong |= _is_repeated(copy_block)
    if is_wrong.any():
        number = int(np.argmax(is_wrong))
        row = {name: int(column[number]) for name, column in rows.items()}
        expected = f"[{copies.start}, {copies.stop})" if is_copy else f"{HOLE}"
        raise RemoteRefusedError(
            Refusal.BAD_MESSAGE,
            f"`rows` has {row} at {number}; expected a full-attention layer and its group, a "
            f"source block below {num_packed} that equals the logical block, "
            f"{geometry.block_tokens} valid tokens, a CPU destination block of {expected}, and no "
            "destination twice.",
        )


def _is_repeated(*columns: np.ndarray) -> np.ndarray:
    """Marks every row whose values an earlier row has."""
    places = np.stack(columns)
    order = np.lexsort(places)  # Stable: of equal rows the earliest is the first.
    is_repeated = np.zeros(len(order), bool)
    ordered = places[:, order]
    is_repeated[order[1:]] = (ordered[:, 1:] == ordered[:, :-1]).all(axis=0)
    return is_repeated


def check_tokens(token_ids: tuple[int, ...], num_vocabulary: int) -> None:
    """Refuses token IDs that the model does not have."""
    if max(token_ids) >= num_vocabulary:
        raise RemoteRefusedError(
            Refusal.BAD_MESSAGE,
            f"`token_ids` has {max(token_ids)}; expected IDs below {num_vocabulary}.",
        )


def check_prefill(
    message: Prefill, *, max_tokens: int, max_copy_blocks: int, num_vocabulary: int
) -> None:
    """Refuses a context that the server cannot hold.

    Args:
        message: the prefill.
        max_tokens: longest sequence of the server.
        max_copy_blocks: largest compaction area of a request.
        num_vocabulary: token IDs are below this.
    """
    longest = min(message.max_tokens, max_tokens)
    if len(message.token_ids) > longest or message.max_tokens > max_tokens:
        raise RemoteRefusedError(
            Refusal.TOO_LARGE,
            f"`token_ids` has {len(message.token_ids)} tokens and `max_tokens` is "
            f"{message.max_tokens}; expected at most {longest} and {max_tokens}.",
        )
    if message.num_copy_blocks > max_copy_blocks:
        raise RemoteRefusedError(
            Refusal.TOO_LARGE,
            f"`num_copy_blocks` is {message.num_copy_blocks}; expected at most {max_copy_blocks}. "
            "Start the server with a larger `--copy-area`.",
        )
    check_tokens(message.token_ids, num_vocabulary)
