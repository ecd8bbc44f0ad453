"""What a query will attend to, estimated from a summary of the keys: no key is read for it."""

from __future__ import annotations

import math

import torch

from torch_bridge.dlpack import aligned_zeros


def moments_of(keys: torch.Tensor) -> torch.Tensor:
    """Summarizes keys: normally distributed ones weigh n · exp(q·mean + q²·variance / 2).

    Args:
        keys: [..., n, head_dim], rotated, of any floating dtype.

    Returns:
        float32 [..., 2 * head_dim]: the mean in the first half of the last axis, the variance in
        the second one.
    """
    keys = keys.float()
    mean = keys.mean(-2)  # in two passes: `torch.var_mean` takes 25 times as long here
    variance = (keys - mean.unsqueeze(-2)).square_().mean(-2)
    return torch.cat([mean, variance], -1)


def features_of(query: torch.Tensor, scale: float) -> torch.Tensor:
    """What moments meet: features · moments is the exponent of `moments_of`.

    Args:
        query: [..., head_dim], rotated.
        scale: softmax scale.

    Returns:
        float32 [..., 2 * head_dim].
    """
    scaled = query.float() * scale
    return torch.cat([scaled, scaled * scaled * 0.5], -1)


class KeyMoments:
    """Mean and variance of the keys in every part of a sequence, of every layer and KV head.

    A part has two vectors, where its tokens have two each: parts of 8 are read at an
    eighth of the cost of all keys and values in the same dtype.

    Attributes:
        part_tokens: tokens a part.
    """

    def __init__(
        self, *, num_rows: int, num_kv_heads: int, head_dim: int, max_tokens: int, part_tokens: int
    ) -> None:
        """Allocates, in float32; memory is taken as it is written."""
        self.part_tokens = part_tokens
        self._head_dim = head_dim
        num_parts = -(-max_tokens // part_tokens)
        self._moments = aligned_zeros(
            num_rows, num_kv_heads, num_parts, 2 * head_dim, dtype=torch.float32
        )

    def add(self, row: int, token_position: int, key: torch.Tensor) -> None:
        """Takes new keys of a row.

        Args:
            row: full-attention layer row.
            token_position: of the first; the number of the row's tokens so far.
            key: [num_kv_heads, num_new, head_dim], rotated, of any floating dtype.
        """
        begin, num_new = 0, key.shape[1]
        while begin < num_new:
            part, num_before = divmod(token_position + begin, self.part_tokens)
            num_whole = 0 if num_before else (num_new - begin) // self.part_tokens
            if num_whole:
                end = begin + num_whole * self.part_tokens
                self._fill(row, part, key[:, begin:end])
            else:
                end = begin + 1
                self._join(row, part, num_before, key[:, begin])
            begin = end

    def _fill(self, row: int, first_part: int, key: torch.Tensor) -> None:
        """Whole parts that had no keys."""
        parts = key.unflatten(1, (-1, self.part_tokens))
        self._moments[row, :, first_part : first_part + parts.shape[1]] = moments_of(parts)

    def _join(self, row: int, part: int, num_before: int, key: torch.Tensor) -> None:
        """One more key [num_kv_heads, head_dim] of a part, which has `num_before`."""
        mean, variance = self._moments[row, :, part].split(self._head_dim, -1)
        share = 1 / (num_before + 1)
        step = key.float() - mean
        variance.addcmul_(step, step, value=share).mul_(1 - share)
        mean.add_(step, alpha=share)

    def mass(
        self, row: int, query: torch.Tensor, *, num_tokens: int, block_tokens: int, scale: float
    ) -> torch.Tensor:
        """Estimates the softmax mass of every block.

        Args:
            row: full-attention layer row.
            query: [num_query_heads, head_dim], rotated.
            num_tokens: the row's tokens, the query's own among them.
            block_tokens: tokens a block, a multiple of `part_tokens`.
            scale: softmax scale.

        Returns:
            float32 [num_query_heads, num_blocks], the partial block among them; the masses of a
            head add up to one.
        """
        num_parts = -(-num_tokens // self.part_tokens)
        moments = self._moments[row, :, :num_parts]
        features = features_of(query, scale).unflatten(0, (moments.shape[0], -1))
        logits = features @ moments.transpose(1, 2)
        num_newest = num_tokens - (num_parts - 1) * self.part_tokens
        logits[..., -1] += math.log(num_newest / self.part_tokens)
        mass = logits.flatten(0, 1).softmax(-1)
        num_missing = -num_parts % (block_tokens // self.part_tokens)
        padded = torch.nn.functional.pad(mass, (0, num_missing))
        return padded.unflatten(1, (-1, block_tokens // self.part_tokens)).sum(-1)
