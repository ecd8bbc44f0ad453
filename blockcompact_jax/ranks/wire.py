"""What an engine and its rank processes say to each other: JSON over a socket pair."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from blockcompact_jax.kernels import Layout
from blockcompact_jax.remote.wire import Count, KeyWire, Place, Positive, SegmentWire

MAX_MESSAGE_BYTES = 64 << 20


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    message_id: Count = 0


class PoolWire(BaseModel):
    """A pool of all KV heads, in a region of a shared segment.

    A packed pool is dense [layer, block, head, 2 * block_tokens, head_dim]. A plain one is
    [head, layer, 2, block * block_tokens, head_dim]: the heads of a rank are one piece of memory,
    its own pool.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    segment: SegmentWire
    region: str
    num_layers: Positive
    num_blocks: Positive
    num_kv_heads: Positive
    block_tokens: Positive
    head_dim: Positive
    element_bytes: Positive

    @property
    def head_elements(self) -> int:
        """Elements of one KV head of one block, keys and values."""
        return 2 * self.block_tokens * self.head_dim

    @property
    def size_bytes(self) -> int:
        """Bytes of the region."""
        blocks = self.num_layers * self.num_blocks
        return blocks * self.num_kv_heads * self.head_elements * self.element_bytes


class OpenPoolWire(_Wire):
    """To a new rank: this is your resident pool; it is empty."""

    kind: Literal["open_pool"] = "open_pool"
    pool: PoolWire
    first_kv_head: Count
    num_kv_heads: Positive


class OpenSourceWire(_Wire):
    """To every rank: read packed blocks here from now on. One layer stands for all."""

    kind: Literal["open_source"] = "open_source"
    pool: PoolWire
    layout: Layout


class TransferWire(_Wire):
    """To every rank: move your heads of these rows. Without rows it only confirms the operation."""

    kind: Literal["transfer"] = "transfer"
    key: KeyWire
    layer_row: list[Count]
    source_block: list[Place]
    physical_block: list[Place]
    valid_tokens: list[Count]


class AnswerWire(_Wire):
    """From a rank: done, or why not.

    Attributes:
        key: The operation, of a transfer.
        refusal: Why nothing was done; empty if it was done.
    """

    key: KeyWire | None = None
    refusal: str = ""


RankMessage = Annotated[OpenPoolWire | OpenSourceWire | TransferWire, Field(discriminator="kind")]
read_message: TypeAdapter[OpenPoolWire | OpenSourceWire | TransferWire] = TypeAdapter(RankMessage)
