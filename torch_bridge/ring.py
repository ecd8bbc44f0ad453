"""The newest tokens of every row, plain, in a ring that forgets the oldest."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class TokenRing:
    """Token position t lies at place t modulo the ring's size; nothing is ever moved.

    Attributes:
        tensor: [num_rows, 2, num_kv_heads, num_tokens, head_dim].
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def num_tokens(self) -> int:
        """Tokens the ring holds."""
        return self.tensor.shape[3]

    def write(self, row: int, token_position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes [num_kv_heads, num_new, head_dim] keys and values of one row.

        Of more tokens than the ring holds, only the newest are kept.
        """
        skipped = max(0, key.shape[1] - self.num_tokens)
        key, value = key[:, skipped:], value[:, skipped:]
        for ring, begin, end in self.pieces(token_position + skipped, key.shape[1]):
            self.tensor[row, 0, :, ring] = key[:, begin:end]
            self.tensor[row, 1, :, ring] = value[:, begin:end]

    def read(self, token_position: int, num_tokens: int) -> torch.Tensor:
        """The KV of `num_tokens` tokens of every row: a view where the ring does not end in it.

        Returns:
            [num_rows, 2, num_kv_heads, num_tokens, head_dim].
        """
        pieces = [
            self.tensor[:, :, :, ring] for ring, _, _ in self.pieces(token_position, num_tokens)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat([self.tensor[:, :, :, :0], *pieces], 3)

    def pieces(self, token_position: int, num_tokens: int) -> Iterator[tuple[slice, int, int]]:
        """Cuts tokens where the ring ends: (place in the ring, begin, end)."""
        begin = 0
        while begin < num_tokens:
            place = (token_position + begin) % self.num_tokens
            end = min(num_tokens, begin + self.num_tokens - place)
            yield slice(place, place + end - begin), begin, end
            begin = end
