"""One open request of a server: its stores, its stored results, its lease."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from blockcompact_jax.ledger.handles import OperationKey
from blockcompact_jax.protocol import Finish, RequestMessage, Verify

from .errors import Refusal, RemoteRefusedError, SegmentError
from .half import VerifierHalf
from .segment import MemoryAllowance, SharedSegment


@dataclass
class OpenRequest:
    """What a server keeps of a request until it is finished.

    Attributes:
        epoch: Its admission.
        num_draft_tokens: Most tokens of one draft.
        max_tokens: Longest sequence.
        num_copy_blocks: Blocks of its compaction area.
        segment: Its shared memory.
        half: Its full KV; None until the prefill's work has begun.
        num_confirmed: Tokens that the client keeps.
        num_packed_tokens: Tokens whose whole blocks the half has packed.
        num_written: Tokens that were verified, the confirmed ones included.
        last_heard: When its client last spoke, by the monotonic clock.
        lock: Held while an operation is at work.
        operations: Digest and result by operation ID, oldest first.
        newest_operation_id: The largest so far.
        keys: Keys of remembered uploads, by operation ID.
        lease: The upload whose sources are held.
    """

    epoch: int
    num_draft_tokens: int
    max_tokens: int
    num_copy_blocks: int
    segment: SharedSegment
    half: VerifierHalf | None = None
    num_confirmed: int = 0
    num_packed_tokens: int = 0
    num_written: int = 0
    last_heard: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    operations: OrderedDict[int, tuple[bytes, asyncio.Task[Any]]] = field(
        default_factory=OrderedDict[int, "tuple[bytes, asyncio.Task[Any]]"]
    )
    newest_operation_id: int = -1
    keys: dict[int, OperationKey] = field(default_factory=dict[int, OperationKey])
    lease: OperationKey | None = None


def check_confirmed(request: OpenRequest, num_tokens: int) -> None:
    """Refuses a count of confirmed tokens that were never verified."""
    if not request.num_confirmed <= num_tokens <= request.num_written:
        raise RemoteRefusedError(
            Refusal.CONFLICT,
            f"{num_tokens} tokens are said to be confirmed; expected "
            f"{request.num_confirmed} to {request.num_written}, which were verified.",
        )


def check_draft(request: OpenRequest, message: Verify) -> None:
    """Refuses a draft that does not follow the confirmed tokens, or is too long."""
    num_tokens = message.first_token_position + len(message.token_ids)
    check_confirmed(request, message.first_token_position)
    if num_tokens > request.max_tokens:
        raise RemoteRefusedError(
            Refusal.TOO_LARGE,
            f"`token_ids` end at {num_tokens}; expected at most `max_tokens` = "
            f"{request.max_tokens} of the prefill.",
        )
    if len(message.token_ids) > request.num_draft_tokens + 1:
        raise RemoteRefusedError(
            Refusal.TOO_LARGE,
            f"`token_ids` has {len(message.token_ids)} tokens; expected at most "
            f"`num_draft_tokens` + 1 = {request.num_draft_tokens + 1}.",
        )


def half_of(request: OpenRequest) -> VerifierHalf:
    """Returns the half of a request whose prefill has ended."""
    if request.half is None or not request.num_written:
        raise RemoteRefusedError(Refusal.CONFLICT, "The prefill has not ended; wait for it.")
    return request.half


async def settle(request: OpenRequest, operation_id: int) -> None:
    """Waits until an operation that got here has ended: then it takes no lease any more."""
    stored = request.operations.get(operation_id)
    if stored is not None and not stored[1].done():
        await asyncio.wait([stored[1]])


def release(request: OpenRequest) -> None:
    """Lets go of everything; on the model's thread."""
    if request.half is not None:
        request.half.close()
    request.half = None
    request.operations.clear()
    request.segment.close()


def new_segment(allowance: MemoryAllowance) -> SharedSegment:
    """Returns an empty segment."""
    try:
        return SharedSegment(allowance)
    except SegmentError as error:
        raise RemoteRefusedError(Refusal.NO_ROOM, str(error)) from error


def request_of(key: OperationKey) -> RequestMessage:
    """Returns what names the request of an operation."""
    return RequestMessage(
        process_epoch=key.process_epoch, request_id=key.request_id, request_epoch=key.request_epoch
    )


def finish_of(message: RequestMessage, request_epoch: int) -> Finish:
    """Returns the end of an admission of a request."""
    return Finish(
        process_epoch=message.process_epoch,
        request_id=message.request_id,
        request_epoch=request_epoch,
    )
