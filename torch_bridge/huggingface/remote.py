"""A session whose verifier is another process: its full KV is read in place."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict, TypeVar

import torch

from blockcompact_jax.protocol import Capabilities
from blockcompact_jax.ranks.group import RankLostError
from blockcompact_jax.remote import wire
from blockcompact_jax.remote.client import Heartbeat, RemoteClient
from blockcompact_jax.remote.errors import ServerLostError
from blockcompact_jax.remote.segment import OpenedSegment
from blockcompact_jax.remote.transfers import LedgerTransfers
from blockcompact_jax.transfer import Pools, Rows, move_rows
from torch_bridge.huggingface.identity import capabilities
from torch_bridge.huggingface.ranks import ResidentRanks
from torch_bridge.huggingface.session import CompactionSession
from torch_bridge.huggingface.verifier import Verifier
from torch_bridge.memory import SharedMemory
from torch_bridge.resident import ResidentKV

_MAX_RECOVERIES = 3
"""Lost servers and ranks that one call survives."""

Answer = TypeVar("Answer")


class _Names(TypedDict):
    process_epoch: int
    request_id: str
    request_epoch: int


@dataclass
class RemoteSession(CompactionSession):
    """A `CompactionSession` that drafts here and verifies on a server.

    When the server was restarted, it shakes hands again, has the confirmed tokens prefilled and
    makes a full plan; drafted tokens of the round are verified then.

    With several ranks the uploads run in a process for each, see `huggingface.ranks`; a lost rank
    is started anew, and a full plan follows.

    Attributes:
        client: connection to the server.
        num_ranks: tensor-parallel ranks; one is this process itself.
        num_recoveries: how often a lost server was replaced.
    """

    client: RemoteClient = field(kw_only=True)
    num_ranks: int = 1
    num_recoveries: int = 0

    def __post_init__(self) -> None:
        self.ranks: ResidentRanks | None = None
        super().__post_init__()
        self._context: list[int] = []
        self._verified: list[int] = []
        try:
            self._remote.connect()
        except BaseException:
            if self.ranks is not None:
                self.ranks.close()
            raise

    def prefill(self, token_ids: list[int]) -> torch.Tensor:
        """Runs the whole context on the server and makes the first selection."""
        self._context = list(token_ids)

        def prefill() -> torch.Tensor:
            try:
                return super(RemoteSession, self).prefill(token_ids)
            except ServerLostError:
                self.num_tokens = 0  # It is repeated as a whole.
                raise

        return self._recovering(prefill)

    def verify(self, token_ids: list[int], *, is_scored: bool) -> torch.Tensor:
        """Forgets the draft's KV, then has its tokens verified."""
        self._verified = list(token_ids)
        return self._recovering(
            lambda: super(RemoteSession, self).verify(token_ids, is_scored=is_scored)
        )

    def confirm(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` verified tokens."""
        super().confirm(num_tokens)
        self._context += self._verified[:num_tokens]

    def reselect(self) -> None:
        """Selects and uploads from the server's memory, then acknowledges the commit."""
        for _ in range(_MAX_RECOVERIES):
            try:
                self._reselect_once()
                return
            except RankLostError:
                self._replace_ranks()
            except ServerLostError:
                if self.runtime.num_selections == 0:
                    raise  # Within a prefill.
                self._reconnect()
        self._reselect_once()

    def close(self) -> None:
        """Ends the request on the server, and the session."""
        self._remote.close()
        super().close()
        if self.ranks is not None:
            self.ranks.close()

    @property
    def _remote(self) -> RemoteVerifier:
        verifier = self.verifier
        if not isinstance(verifier, RemoteVerifier):
            raise TypeError(f"`verifier` is a {type(verifier).__name__}; expected RemoteVerifier")
        return verifier

    def _new_verifier(self) -> Verifier:
        return RemoteVerifier(self)

    def _recovering(self, work: Callable[[], Answer]) -> Answer:
        for _ in range(_MAX_RECOVERIES):
            try:
                return work()
            except ServerLostError:
                if self.num_tokens:
                    self._recover()
                else:
                    self._reset()
        return work()

    def _reselect_once(self) -> None:
        super().reselect()
        self._remote.transfers.acknowledge()

    def _reset(self) -> None:
        """Shakes hands again; nothing is resident from now on."""
        self._remote.connect()
        self._forget_residency()
        self.num_recoveries += 1

    def _reconnect(self) -> None:
        """Has the confirmed tokens prefilled anew; a full plan from their scores is to follow."""
        self.cache.rollback(self.cache.get_seq_length() - self.num_tokens)
        self._reset()
        self.verifier.prefill(self._context)

    def _recover(self) -> None:
        self._reconnect()
        self.reselect()

    def _replace_ranks(self) -> None:
        """Starts lost ranks anew; their pools are empty, so a full plan is to follow."""
        if self.ranks is not None:
            self.ranks.group.replace_lost()
        self._forget_residency()
        self._remote.attach()

    def _forget_residency(self) -> None:
        metrics = self.runtime.metrics
        self.runtime = self._new_runtime()
        self.runtime.metrics = metrics

    def _new_resident(self) -> ResidentKV:
        if self.num_ranks == 1:
            return super()._new_resident()
        self.ranks = ResidentRanks(self.sizes.shape, self.num_ranks)
        return self.ranks.start(self.runtime.num_physical_blocks)


class RemoteVerifier:
    """A `Verifier` that asks a server and reads its memory."""

    def __init__(self, session: RemoteSession) -> None:
        self._session = session
        self._client = session.client
        self._request_id = secrets.token_hex(16)
        self._transfers: LedgerTransfers | None = None
        self._heartbeat: Heartbeat | None = None

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
            )

        process_epoch = self._client.shake_hands(ours)
        if self._transfers is None:
            self._transfers = LedgerTransfers(
                self._request_id, process_epoch, self._send, num_ranks=session.num_ranks
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
        )
        answer = self._client.call("prefill", message, wire.PrefillAnswer)
        segment = OpenedSegment(answer.segment.to_handle())
        memory = SharedMemory(segment)
        try:
            full = sizes.full_kv(memory)
            blocks = sizes.block_attention(session.cache, memory)
            self._windows = sizes.windows(memory)
            self._logits = sizes.logits(memory)
        finally:
            segment.close()
        full.mark_packed(len(token_ids))
        session.full.close()
        session.full = session.cache.full = full
        session.blocks = blocks
        if session.ranks is not None:
            session.ranks.open_source(full, answer.segment)
        self.attach()
        session.cache.adopt(self._windows, len(token_ids))
        self._stop_heartbeat()
        self._heartbeat = Heartbeat(self._client, wire.FinishWire(**self._names))
        return self._logits[0].clone()

    def attach(self) -> None:
        """Joins the session's runtime, the stores and whoever moves bytes between them."""
        session = self._session
        pools = Pools(packed=session.full.packed_pool, resident=session.resident.pool)
        session.runtime.attach(pools, self.transfers.transaction, self._move)

    def _move(self, rows: Rows) -> None:
        """Moves a transfer's bytes; every rank says to the ledger that it has."""
        session, transfers = self._session, self.transfers
        if session.ranks is not None:
            session.ranks.group.transfer(transfers.open_key, rows, transfers.landed)
            return
        move_rows(Pools(packed=session.full.packed_pool, resident=session.resident.pool), rows)
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

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
