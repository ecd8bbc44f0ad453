"""What the server does with each message. No HTTP here, and no model: that half is given to it.

State changes on the event loop alone; model work runs on one thread, one piece at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from blockcompact_jax.protocol import (
    Abort,
    Ack,
    Agreement,
    CompactionUpload,
    CpuPoolArea,
    Finish,
    HandshakeError,
    Initialize,
    Prefill,
    RequestMessage,
    Verify,
    canonical_body,
    shake_hands,
)
from blockcompact_jax.upload import SourceKind

from .checks import check_prefill, check_rows, check_tokens
from .errors import Refusal, RemoteRefusedError, SegmentError
from .half import VerifierEngine
from .open_request import (
    OpenRequest,
    check_confirmed,
    check_draft,
    finish_of,
    half_of,
    new_segment,
    release,
    request_of,
    settle,
)
from .segment import MemoryAllowance, SegmentHandle

Answer = TypeVar("Answer")

MAX_OPERATIONS: Final = 16
"""Results that are remembered for each request."""
MAX_FINISHED: Final = 4096
"""Finished requests that are remembered, so that a late message opens none again."""


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """What bounds a server.

    Attributes:
        max_requests: Requests that may be open at once.
        memory_bytes: Shared memory of all requests together.
        lease_seconds: A request that is silent for longer has lost its client, and is released.
        max_copy_blocks: Largest compaction area of a request; 0 serves in-place reading only.
    """

    max_requests: int
    memory_bytes: int
    lease_seconds: float
    max_copy_blocks: int = 0


class VerifierService:
    """Open requests, stored results and source leases of one server process."""

    def __init__(
        self, engine: VerifierEngine, limits: ServiceLimits, *, process_epoch: int
    ) -> None:
        self.limits = limits
        self.process_epoch = process_epoch
        self.allowance = MemoryAllowance(limits.memory_bytes)
        self._engine = engine
        self._requests: dict[str, OpenRequest] = {}
        self._finished: OrderedDict[str, int] = OrderedDict()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="verifier")

    @property
    def num_requests(self) -> int:
        """Open requests."""
        return len(self._requests)

    @property
    def num_leases(self) -> int:
        """Operations whose sources are held."""
        return sum(request.lease is not None for request in self._requests.values())

    def initialize(self, message: Initialize) -> Agreement:
        """Compares what both sides say of themselves (CAP-2, CAP-3).

        Raises:
            RemoteRefusedError: They differ.
        """
        producer = self._engine.capabilities(self.process_epoch)
        area = self._area(self._engine.max_tokens, self.limits.max_copy_blocks)
        try:
            return shake_hands(
                producer,
                message.capabilities,
                area=area,
                is_copy_fallback_asked=message.is_copy_fallback_asked,
            )
        except HandshakeError as error:
            raise RemoteRefusedError(Refusal.HANDSHAKE, str(error)) from error

    async def prefill(self, message: Prefill) -> SegmentHandle:
        """Opens a request and verifies its context."""
        self._check_epoch(message.process_epoch)
        request = await self._opened(message)

        def work() -> SegmentHandle:
            half = self._engine.open(
                request.segment,
                max_tokens=request.max_tokens,
                num_draft_tokens=request.num_draft_tokens,
                num_copy_blocks=request.num_copy_blocks,
            )
            request.half = half
            handle = request.segment.seal()
            half.prefill(message.token_ids)
            return handle

        async def prefill() -> SegmentHandle:
            if request.half is not None:
                raise RemoteRefusedError(
                    Refusal.CONFLICT,
                    f"`request_id` {message.request_id!r} has its context already; finish it, or "
                    "use a larger epoch.",
                )
            handle = await self._on_model(work)
            request.num_confirmed = request.num_written = len(message.token_ids)
            return handle

        try:
            return await self._once(request, message.operation_id, canonical_body(message), prefill)
        except SegmentError as error:
            await self.finish(finish_of(message, message.request_epoch))
            raise RemoteRefusedError(Refusal.NO_ROOM, str(error)) from error
        except RemoteRefusedError:
            raise
        except Exception:  # Half a context is of no use to anybody.
            await self.finish(finish_of(message, message.request_epoch))
            raise

    async def verify(self, message: Verify) -> int:
        """Verifies drafted tokens; returns the tokens written so far."""
        self._check_epoch(message.process_epoch)
        request = self._request(message)
        num_tokens = message.first_token_position + len(message.token_ids)

        async def verify() -> int:
            half = half_of(request)
            check_draft(request, message)
            check_tokens(message.token_ids, self._engine.num_vocabulary)

            def work() -> None:
                half.confirm(message.first_token_position)
                half.verify(message.token_ids, is_scoring=message.is_scoring)

            await self._on_model(work)
            request.num_confirmed = request.num_packed_tokens = message.first_token_position
            request.num_written = num_tokens
            return num_tokens

        return await self._once(request, message.operation_id, canonical_body(message), verify)

    async def upload(self, message: CompactionUpload) -> int:
        """Holds the sources of an upload until its ACK or abort; returns the packed blocks."""
        key = message.key
        self._check_epoch(key.process_epoch)
        request = self._request(request_of(key))
        num_blocks = message.num_tokens // self._engine.geometry.block_tokens
        area = self._area(request.max_tokens, request.num_copy_blocks)

        async def upload() -> int:
            half = half_of(request)
            check_confirmed(request, message.num_tokens)
            check_rows(message, geometry=self._engine.geometry, num_packed=num_blocks, area=area)
            if request.lease is not None:
                raise RemoteRefusedError(
                    Refusal.CONFLICT,
                    f"Operation {request.lease.operation_id} still holds its sources; acknowledge "
                    "or abort it first.",
                )
            is_copying = message.source_kind is SourceKind.CPU_COPY

            def work() -> None:
                half.confirm(message.num_tokens)
                if is_copying:
                    copies = message.rows.cpu_destination_block
                    half.gather(
                        message.rows.layer,
                        message.rows.source_block,
                        [block - area.num_source_blocks for block in copies],
                    )

            if is_copying or request.num_packed_tokens != message.num_tokens:
                await self._on_model(work)
            request.num_confirmed = request.num_packed_tokens = message.num_tokens
            request.lease = key
            request.keys[key.operation_id] = key
            return num_blocks

        return await self._once(request, key.operation_id, canonical_body(message), upload)

    async def end_operation(self, message: Ack | Abort) -> bool:
        """Releases the sources of an operation; returns whether that was done before."""
        key = message.key
        self._check_epoch(key.process_epoch)
        if self._finished.get(key.request_id, -1) >= key.request_epoch:
            return True
        request = self._request(request_of(key))
        await settle(request, key.operation_id)
        if self._requests.get(key.request_id) is not request:
            return True
        if request.lease == key:
            request.lease = None
            return False
        known = request.keys.get(key.operation_id)
        if known == key:
            return True
        if known is None and isinstance(message, Abort):
            # There is nothing to release; should it get here yet, it is refused.
            request.newest_operation_id = max(request.newest_operation_id, key.operation_id)
            return True
        raise RemoteRefusedError(
            Refusal.UNKNOWN if known is None else Refusal.CONFLICT,
            f"`key` names operation {key.operation_id} of request {key.request_id!r}, which is "
            f"{'not known' if known is None else 'another one'}; nothing was released.",
        )

    async def finish(self, message: Finish) -> bool:
        """Ends a request; returns whether it had ended before."""
        self._check_epoch(message.process_epoch)
        if self._finished.get(message.request_id, -1) >= message.request_epoch:
            return True
        request = self._request(message)
        async with request.lock:
            if self._requests.get(message.request_id) is not request:
                return True
            del self._requests[message.request_id]
            self._finished[message.request_id] = request.epoch
            self._finished.move_to_end(message.request_id)
            while len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)
            await self._on_model(lambda: release(request))
        return False

    def heartbeat(self, message: Finish) -> None:
        """Takes down that a request's client is alive."""
        self._check_epoch(message.process_epoch)
        self._request(message)

    async def release_lost(self) -> int:
        """Ends requests whose client was silent too long; returns how many."""
        now = time.monotonic()
        lost = [
            (request_id, request)
            for request_id, request in self._requests.items()
            if now - request.last_heard > self.limits.lease_seconds and not request.lock.locked()
        ]
        for request_id, request in lost:
            await self._end(request_id, request)
        return len(lost)

    async def close(self) -> None:
        """Ends every request."""
        for request_id, request in list(self._requests.items()):
            await self._end(request_id, request)
        self._executor.shutdown()

    async def _opened(self, message: Prefill) -> OpenRequest:
        """Returns the request of a prefill; opens it, and ends its admission before, if need be."""
        known = self._requests.get(message.request_id)
        if known is not None and known.epoch >= message.request_epoch:
            return self._request(message)
        self._check_prefill(message)
        if known is not None:
            await self.finish(finish_of(message, known.epoch))
            return await self._opened(message)  # A retry may have opened it meanwhile (COM-4).
        if self.num_requests >= self.limits.max_requests:
            raise RemoteRefusedError(
                Refusal.NO_ROOM,
                f"All {self.limits.max_requests} places for requests are taken; finish some, "
                "or start the server with a larger limit.",
            )
        request = self._requests[message.request_id] = OpenRequest(
            epoch=message.request_epoch,
            num_draft_tokens=message.num_draft_tokens,
            max_tokens=message.max_tokens,
            num_copy_blocks=message.num_copy_blocks,
            segment=new_segment(self.allowance),
        )
        return request

    async def _end(self, request_id: str, request: OpenRequest) -> None:
        message = Finish(
            process_epoch=self.process_epoch, request_id=request_id, request_epoch=request.epoch
        )
        await self.finish(message)

    def _area(self, max_tokens: int, num_copy_blocks: int) -> CpuPoolArea:
        num_blocks = -(-max_tokens // self._engine.geometry.block_tokens)
        return CpuPoolArea(
            num_source_blocks=num_blocks, num_cpu_blocks=num_blocks + num_copy_blocks
        )

    async def _on_model(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _once(
        self,
        request: OpenRequest,
        operation_id: int,
        body: bytes,
        work: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        """Does the work of an operation once; a retry gets its stored result (COM-4)."""
        digest = hashlib.sha256(body).digest()
        stored = request.operations.get(operation_id)
        if stored is not None and stored[0] != digest:
            raise RemoteRefusedError(
                Refusal.CONFLICT,
                f"`operation_id` {operation_id} was used for another message; use a new one.",
            )
        if stored is None:
            if operation_id <= request.newest_operation_id:
                raise RemoteRefusedError(
                    Refusal.CONFLICT,
                    f"`operation_id` {operation_id} is not newer than "
                    f"{request.newest_operation_id}, and its result is not remembered; use a "
                    "larger one.",
                )
            stored = digest, asyncio.ensure_future(self._serially(request, operation_id, work))
            request.operations[operation_id] = stored
            while len(request.operations) > MAX_OPERATIONS:
                request.keys.pop(request.operations.popitem(last=False)[0], None)
            request.newest_operation_id = operation_id
        # A client that goes away must not stop work that its retry will ask for.
        return await asyncio.shield(stored[1])

    async def _serially(
        self, request: OpenRequest, operation_id: int, work: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        try:
            async with request.lock:
                return await work()
        except RemoteRefusedError:  # Nothing was done: the same ID may be used once more.
            request.operations.pop(operation_id, None)
            if request.newest_operation_id == operation_id:
                request.newest_operation_id = operation_id - 1
            raise
        finally:
            request.last_heard = time.monotonic()

    def _request(self, message: RequestMessage) -> OpenRequest:
        request = self._requests.get(message.request_id)
        if request is None or request.epoch != message.request_epoch:
            raise RemoteRefusedError(
                Refusal.UNKNOWN,
                f"`request_id` {message.request_id!r} of epoch {message.request_epoch} is not "
                "open: it was never prefilled, has finished, or was silent for more than "
                f"{self.limits.lease_seconds:g} s. Prefill it with a larger epoch.",
            )
        request.last_heard = time.monotonic()
        return request

    def _check_epoch(self, process_epoch: int) -> None:
        if process_epoch != self.process_epoch:
            raise RemoteRefusedError(
                Refusal.EPOCH,
                f"`process_epoch` is {process_epoch}; this server's is {self.process_epoch}. It "
                "was restarted: shake hands and prefill again.",
            )

    def _check_prefill(self, message: Prefill) -> None:
        if self._finished.get(message.request_id, -1) >= message.request_epoch:
            raise RemoteRefusedError(
                Refusal.UNKNOWN,
                f"`request_id` {message.request_id!r} of epoch {message.request_epoch} has "
                "finished; use a larger epoch.",
            )
        check_prefill(
            message,
            max_tokens=self._engine.max_tokens,
            max_copy_blocks=self.limits.max_copy_blocks,
            num_vocabulary=self._engine.num_vocabulary,
        )
