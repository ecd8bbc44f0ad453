"""What the mask of a padded batch says of its rows."""

from __future__ import annotations

import torch


def num_padding_tokens(mask: torch.Tensor | None, batch: int) -> list[int]:
    """Counts each row's left padding.

    Args:
        mask: bool [batch or 1, 1, num_queries, num_tokens], True where visible; None where no row
            is padded.
        batch: rows.

    Returns:
        Padding tokens of each row.

    Raises:
        ValueError: if a row is padded elsewhere than before its first token, or has no token.
    """
    if mask is None:
        return [0] * batch
    newest = mask[:, 0, -1].expand(batch, -1)
    padding = newest.to(torch.int8).argmax(-1)
    is_left = torch.arange(newest.shape[1]) >= padding[:, None]
    for place in range(batch):
        if not bool(newest[place].any()):
            raise ValueError(
                f"`attention_mask` of row {place} hides all of its first {newest.shape[1]} tokens; "
                "expected at least one token in a row's first forward. With "
                "`prefill_chunk_size`, set it above the longest padding or leave it out."
            )
        if not torch.equal(newest[place], is_left[place]):
            raise ValueError(
                f"`attention_mask` of row {place} hides tokens after the first visible one; "
                "expected padding on the left only. Set the tokenizer's `padding_side='left'`."
            )
    return padding.tolist()
