"""Which rows of a batch are decoding requests seen before, and what they have selected.

An attention backend is told block tables and lengths, not request names. A request is recognised by
its physical blocks: its first belongs to it alone (prefix caching is off), the others must be as
they were, and its length what its last step made it. A row that does not match starts anew, so a
finished, preempted or aborted request leaves nothing behind: whatever was not seen in a step is
forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int32

from torch_bridge.vllm.host_blocks import HostedBlocks


@dataclass(frozen=True)
class Selection:
    """Blocks that a request is to attend to.

    Attributes:
        selected: [row, num_selected] logical blocks, ascending.
        num_candidate_blocks: blocks before the always-attended tail.
    """

    selected: Int32[np.ndarray, "row selected"]
    num_candidate_blocks: int

    def blocks(self, num_blocks: int) -> Int32[np.ndarray, " blocks"]:
        """Logical blocks of the first row and the tail, of so many blocks, ascending."""
        tail = np.arange(self.num_candidate_blocks, num_blocks, dtype=np.int32)
        return np.concatenate([self.selected[0], tail])


@dataclass(eq=False)
class DecodingRequest:
    """One request between two decoding steps.

    Attributes:
        physical_blocks: its whole block table at its last step, in sequence order.
        num_tokens: its length at its last step, the token of that step included.
        next_num_tokens: what its length must be at its next step.
        selected: [row, num_selected] logical blocks, ascending; None before the first selection.
        num_candidate_blocks: blocks before the always-attended tail, as of the selection.
        selected_at_tokens: its length when that was made.
        reselect_at_tokens: its length when it is scored again.
        is_retained: what was not selected is no longer its own; its layers select the same.
        num_drafts: tokens drafted behind its last step.
        awaited: a selection some of whose blocks must come back first; what is not in it is no
            longer its own after the step, and what comes back will be.
        came_back: physical blocks by logical block, where the engine's table does not name them.
        arriving: the logical blocks that it waits for.
        hosted: its blocks in host memory; None where there is none.
    """

    physical_blocks: Int32[np.ndarray, " blocks"]
    num_tokens: int
    next_num_tokens: int = 0
    selected: Int32[np.ndarray, "row selected"] | None = None
    num_candidate_blocks: int = 0
    selected_at_tokens: int = 0
    reselect_at_tokens: int = 0
    is_retained: bool = False
    num_drafts: int = 0
    awaited: Selection | None = None
    arriving: tuple[int, ...] = ()
    came_back: dict[int, int] = field(default_factory=dict[int, int])
    hosted: HostedBlocks | None = None

    def own_blocks(self) -> Int32[np.ndarray, " own"]:
        """Logical blocks whose KV is its own in the engine's memory, ascending."""
        num_blocks = self.physical_blocks.size
        if self.awaited is not None:
            return self.awaited.blocks(num_blocks)
        if self.selected is None or not self.is_retained:
            return np.arange(num_blocks, dtype=np.int32)
        return Selection(self.selected, self.num_candidate_blocks).blocks(num_blocks)


class RetainedRequests:
    """Requests of one engine that gave blocks back, from their first such step until they are gone.

    The worker, which selects, adds them; the manager, which owns the blocks, asks what is dropped
    and says when a request is gone. Both live in one process and take turns. A request goes by its
    first physical block, which it never gives back and shares with none.
    """

    def __init__(self) -> None:
        self._by_first_block: dict[int, DecodingRequest] = {}

    def add(self, request: DecodingRequest) -> None:
        """Remembers a request that is in the step that is being planned."""
        self._by_first_block[int(request.physical_blocks[0])] = request

    def find(self, first_block: int) -> DecodingRequest | None:
        """The request with this first physical block, None where it is not known."""
        return self._by_first_block.get(first_block)

    def dropped_blocks(self, first_block: int) -> list[int]:
        """Logical blocks that a request gives or gave back, ascending; none of an unknown one."""
        request = self.find(first_block)
        if request is None:
            return []
        own = request.own_blocks()
        return np.setdiff1d(np.arange(request.physical_blocks.size), own).tolist()

    def awaited_blocks(self, first_block: int) -> list[int]:
        """Logical blocks that a request waits for, ascending; none of an unknown one."""
        request = self.find(first_block)
        if request is None:
            return []
        return [block for block in request.arriving if block not in request.came_back]

    def come_back(self, first_block: int, logical_block: int, physical_block: int) -> None:
        """Takes an empty block of the engine for one that a request waits for.

        Raises:
            ValueError: for a block that it does not wait for.
        """
        request = self.find(first_block)
        if request is None or logical_block not in self.awaited_blocks(first_block):
            raise ValueError(
                f"`logical_block` is {logical_block}, which the request in physical block "
                f"{first_block} does not wait for; expected one of `awaited_blocks`"
            )
        request.came_back[logical_block] = physical_block

    def forget(self, first_block: int) -> None:
        """Forgets a request that no longer owns its blocks."""
        request = self._by_first_block.pop(first_block, None)
        if request is not None and request.hosted is not None:
            request.hosted.release()


class RequestTracker:
    """Keeps the decoding requests of one KV-cache group from step to step.

    Attributes:
        block_tokens: tokens a block.
    """

    def __init__(self, block_tokens: int, retained: RetainedRequests | None = None) -> None:
        """Starts with no request.

        Args:
            block_tokens: tokens a block.
            retained: where requests that gave blocks back are remembered, until their owner says
                that they are gone; None where none does.
        """
        self.block_tokens = block_tokens
        self._retained = retained
        self._by_first_block: dict[int, DecodingRequest] = {}

    def schedule(self, request: DecodingRequest, *, every_tokens: int) -> None:
        """Says when a request that was just scored is scored again: at latest after `every_tokens`.

        Requests that were scored together are spread over the steps until then, the first scorings
        again as late as that allows, so that no step has to score all of them.

        Args:
            request: as of the step it was scored in.
            every_tokens: most tokens between two scorings.
        """
        num_due = [0] * (every_tokens + 1)  # by steps from the scored one
        for other in self._by_first_block.values():
            wait = other.reselect_at_tokens - other.num_tokens
            if other is not request and other.selected is not None and 0 < wait <= every_tokens:
                num_due[wait] += 1
        latest_first = range(every_tokens, 0, -1)
        wait = min(latest_first, key=num_due.__getitem__)
        request.reselect_at_tokens = request.num_tokens + wait

    def step(
        self,
        block_table: Int32[np.ndarray, "batch max_blocks"],
        num_tokens: Int32[np.ndarray, " batch"],
        is_decoding: Bool[np.ndarray, " batch"],
    ) -> list[DecodingRequest | None]:
        """Recognises the requests of one step.

        Args:
            block_table: physical blocks of every row of the batch; entries past a row's length may
                hold anything.
            num_tokens: length of every row, the tokens of this step included.
            is_decoding: rows past their prompt, whose newest token by `num_tokens` is the only one
                that is new and certain.

        Returns:
            For each row its request, brought up to this step; None for rows that do not decode,
            but for those of requests that gave blocks back: all their later steps must skip these.

        Raises:
            RuntimeError: for a request that gave blocks back and lost others.
        """
        rows: list[DecodingRequest | None] = []
        by_first_block: dict[int, DecodingRequest] = {}
        for table, length, is_row_decoding in zip(
            block_table, num_tokens.tolist(), is_decoding, strict=True
        ):
            blocks = table[: -(-length // self.block_tokens)].copy()
            request = self._find_retained(blocks, length)
            if request is None and not is_row_decoding:
                rows.append(None)
                continue
            request = request or self._find(blocks, length)
            request.physical_blocks, request.num_tokens = blocks, length
            request.next_num_tokens = length + 1
            by_first_block[int(blocks[0])] = request
            rows.append(request)
            if self._retained is not None and request.is_retained:
                self._retained.add(request)
        self._by_first_block = by_first_block
        return rows

    def _find_retained(
        self, blocks: Int32[np.ndarray, " blocks"], num_tokens: int
    ) -> DecodingRequest | None:
        if self._retained is None or not blocks.size:
            return None
        known = self._retained.find(int(blocks[0]))
        if known is None:
            return None
        _check(known, blocks, num_tokens)
        for logical_block, physical_block in known.came_back.items():
            blocks[logical_block] = physical_block
        return known

    def _find(self, blocks: Int32[np.ndarray, " blocks"], num_tokens: int) -> DecodingRequest:
        known = self._by_first_block.get(int(blocks[0])) if blocks.size else None
        if known is not None and known.next_num_tokens == num_tokens:
            before = known.physical_blocks
            if np.array_equal(before, blocks[: before.size]):
                return known
        return DecodingRequest(physical_blocks=blocks, num_tokens=num_tokens)


def _check(known: DecodingRequest, blocks: Int32[np.ndarray, " blocks"], num_tokens: int) -> None:
    before = known.physical_blocks
    # In the places of what was given back, vLLM may go on naming it or name its null block.
    own = np.setdiff1d(known.own_blocks(), list(known.came_back))
    if known.num_tokens < num_tokens and np.array_equal(before[own], blocks[own]):
        return
    raise RuntimeError(
        f"the request in physical block {blocks[0]} gave blocks back at {known.num_tokens} tokens, "
        f"and now has {num_tokens} tokens and other blocks; its KV is lost. This is a fault of "
        "blockcompact or a version of vLLM that it does not know"
    )
