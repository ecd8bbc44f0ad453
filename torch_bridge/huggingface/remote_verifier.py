"""A `Verifier` whose full KV is another process': messages there, bytes read in place."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypedDict

import torch

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.kernels import RegisteredPool
from blockcompact_jax.ledger_transfers import LedgerTransfers
from blockcompact_jax.protocol import Capabilities
from blockcompact_jax.ranks.group import RankRefusedError
from blockcompact_jax.remote import wire
from blockcompact_jax.remote.client import Heartbeat
from blockcompact_jax.remote.errors import SegmentError, ServerLostError
from blockcompact_jax.remote.producer import RemoteProducer
from blockcompact_jax.remote.segment import OpenedSegment
from blockcompact_jax.transfer import Pools, Rows, move_rows
from torch_bridge.full import PACKED_REGION
from torch_bridge.huggingface.identity import capabilities
from torch_bridge.huggingface.sizes import COPIES_REGION
from torch_bridge.memory import SharedMemory

if TYPE_CHECKING:
    from torch_bridge.huggingface.remote import RemoteSession


class _Names(TypedDict):
    process_epoch: int
    request_id: str
    request_epoch: int


class RemoteVerifier:
    """A `Verifier` that asks a server and reads its memory."""

    def __init__(self, session: RemoteSession) -> None:
        self._session = session
        self._client = session.client
        self._request_id = secrets.token_hex(16)
        self._transfers: LedgerTransfers | None = None
        self._heartbeat: Heartbeat | None = None
        self._copies_pool: RegisteredPool | None = None

    @property
    def transfers(self) -> LedgerTransfers:
        """The ledger of this request's uploads."""
        if self._transfers is None:
            raise RuntimeError("not connected; call `connect` first")
        return self._transfers

    def connect(self) -> None:
        """Shakes hands, for the first time or with a new process."""
        self._stop_heartbeat()
        session = self._session

        def ours(process_epoch: int) -> Capabilities:
            return capabilities(
                session.model,
                session.geometry,
                attention=session.attention,
                process_epoch=process_epoch,
                source_kinds=frozenset({session.source_kind}),
            )

        process_epoch = self._client.shake_hands(ours, is_copy_fallback_asked=session.is_copying)
        self._check_area()
        if self._transfers is None:
            self._transfers = LedgerTransfers(
                self._request_id,
                process_epoch=process_epoch,
                num_ranks=session.num_ranks,
                producer=RemoteProducer(self._send),
            )
        else:
            self._transfers.restart(process_epoch)

    def prefill(self, token_ids: list[int]) -> torch.Tensor:
        """Has the whole context verified and opens the server's stores."""
        session, sizes = self._session, self._session.sizes
        message = wire.PrefillWire(
            **self._names,
            operation_id=self.transfers.new_operation_id(),
            token_ids=token_ids,
            max_tokens=session.limits.max_tokens,
            num_draft_tokens=sizes.num_draft_tokens,
            num_copy_blocks=session.num_copy_blocks,
        )
        answer = self._client.call("prefill", message, wire.PrefillAnswer)
        with self._opening_memory(), closing(OpenedSegment(answer.segment.to_handle())) as segment:
            memory = SharedMemory(segment)
            full = sizes.full_kv(memory)
            blocks = sizes.block_attention(session.cache, memory)
            self._windows = sizes.windows(memory)
            self._logits = sizes.logits(memory)
            copies = sizes.copies(session.num_copy_blocks, memory)
        full.mark_packed(len(token_ids))
        session.full.close()
        session.full = session.cache.full = full
        session.blocks = blocks
        self._open_copies(copies)
        if session.ranks is not None:
            region = COPIES_REGION if session.is_copying else PACKED_REGION
            with self._opening_memory():
                session.ranks.open_source(self.source_pool, answer.segment, region=region)
        self.attach()
        session.cache.adopt(self._windows, len(token_ids))
        self._stop_heartbeat()
        self._heartbeat = Heartbeat(self._client, wire.FinishWire(**self._names))
        return self._logits[0].clone()

    @contextmanager
    def _opening_memory(self) -> Generator[None]:
        """Tells memory that is gone with its server from memory that cannot be opened at all.

        Raises:
            ServerLostError: the server, or the request on it, is gone.
            SegmentError: both are there, and this process cannot open the memory all the same.
            RankRefusedError: both are there, and a rank cannot.
        """
        try:
            yield
        except (SegmentError, RankRefusedError):
            message = wire.FinishWire(**self._names)
            self._client.call("heartbeat", message, wire.DoneAnswer, is_patient=False)
            raise

    @property
    def source_pool(self) -> RegisteredPool:
        """What transfers read: the server's blocks, or the copies that it gathers."""
        return self._copies_pool or self._session.full.packed_pool

    def attach(self) -> None:
        """Joins the session's runtime, the stores and whoever moves bytes between them."""
        session = self._session
        pools = Pools(packed=self.source_pool, resident=session.resident.pool)
        session.runtime.attach(pools, self.transfers.transaction, self._move)

    def _move(self, rows: Rows) -> None:
        """Moves a transfer's bytes; every rank says to the ledger that it has."""
        session, transfers = self._session, self.transfers
        if session.ranks is not None:
            session.ranks.group.transfer(transfers.open_key, rows, transfers.landed)
            return
        move_rows(Pools(packed=self.source_pool, resident=session.resident.pool), rows)
        transfers.landed(0, transfers.open_key)

    def verify(self, token_ids: list[int], *, is_scored: bool) -> torch.Tensor:
        """Has tokens verified after the kept ones."""
        session = self._session
        message = wire.VerifyWire(
            **self._names,
            operation_id=self.transfers.new_operation_id(),
            first_token_position=session.num_tokens,
            token_ids=token_ids,
            is_scoring=is_scored,
        )
        self._client.call("verify", message, wire.VerifyAnswer)
        session.full.mark_packed(session.num_tokens)
        return self._logits[: len(token_ids)].clone()

    def keep(self, num_tokens: int) -> None:
        """Takes the kept tokens over; the next message tells the server which they are."""
        self._session.cache.adopt(self._windows, num_tokens)

    def pack(self, num_tokens: int) -> None:
        """Nothing to do: the server packs before it answers the next message."""

    def close(self) -> None:
        """Ends the request, if the server is still there."""
        self._stop_heartbeat()
        self._close_copies()
        try:
            message = wire.FinishWire(**self._names)
            self._client.call("finish", message, wire.DoneAnswer, is_patient=False)
        except ServerLostError:
            pass  # What is gone holds nothing.
        finally:
            self._client.close()

    @property
    def _names(self) -> _Names:
        return {
            "process_epoch": self.transfers.ledger.process_epoch,
            "request_id": self._request_id,
            "request_epoch": self.transfers.request_epoch,
        }

    def _send(
        self, name: str, message: wire.AckWire | wire.AbortWire | wire.CompactionUploadWire
    ) -> None:
        if isinstance(message, wire.CompactionUploadWire):
            self._client.call(name, message, wire.UploadAnswer)
            self._session.full.mark_packed(message.num_tokens)
        else:
            is_patient = isinstance(message, wire.AckWire)
            self._client.call(name, message, wire.DoneAnswer, is_patient=is_patient)

    def _check_area(self) -> None:
        num_needed, num_most = self._session.num_copy_blocks, self._client.max_copy_blocks
        if num_needed > num_most:
            raise CompactionError(
                f"The copy fallback needs a compaction area of {num_needed:,} blocks; the server "
                f"gives at most {num_most:,}. Start it with `--copy-area {num_needed}`, or use a "
                "smaller budget."
            )

    def _open_copies(self, copies: torch.Tensor) -> None:
        """Registers the compaction area; it stands for every layer."""
        self._close_copies()
        session = self._session
        if session.is_copying:
            self._copies_pool = session.sizes.shape.register_packed(
                copies[None], len(copies), session.layout, is_writable=False
            )

    def _close_copies(self) -> None:
        if self._copies_pool is not None:
            self._copies_pool.close()
            self._copies_pool = None

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
