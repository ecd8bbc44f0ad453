"""A session whose verifier is another process: its full KV is read in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from blockcompact_jax.costs import UNMEASURED, Term
from blockcompact_jax.ranks.group import RankLostError, RankRefusedError
from blockcompact_jax.remote.client import RemoteClient
from blockcompact_jax.remote.errors import ServerLostError
from blockcompact_jax.upload import SourceKind
from torch_bridge.huggingface.ranks import ResidentRanks
from torch_bridge.huggingface.remote_verifier import RemoteVerifier
from torch_bridge.huggingface.session import CompactionSession
from torch_bridge.huggingface.verifier import Verifier
from torch_bridge.resident import ResidentKV

_MAX_RECOVERIES = 3
"""Lost servers and ranks that one call survives."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Where a session is verified, and how its uploads run; as `RemoteSession` has them.

    Attributes:
        client: connection to the server.
        num_ranks: tensor-parallel ranks.
        is_copying: whether the server gathers blocks before each upload.
    """

    client: RemoteClient
    num_ranks: int = 1
    is_copying: bool = False


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
        is_copying: whether the server gathers blocks into a compaction area before each upload,
            instead of their being read in place (CAP-3).
        num_recoveries: how often a lost server was replaced.
    """

    client: RemoteClient = field(kw_only=True)
    num_ranks: int = 1
    is_copying: bool = False
    num_recoveries: int = 0

    def __post_init__(self) -> None:
        self.ranks: ResidentRanks | None = None
        self._context: list[int] = []
        self._verified: list[int] = []
        self._is_prefilling = False
        with ExitStack() as undo:
            undo.callback(self._close_ranks)
            super().__post_init__()
            undo.callback(super().close)
            self._remote.connect()
            undo.pop_all()

    def prefill(self, token_ids: list[int]) -> torch.Tensor:
        """Runs the whole context on the server and makes the first selection."""
        self._context = list(token_ids)

        def prefill() -> torch.Tensor:
            self.num_tokens = 0  # A lost server repeats it as a whole.
            return super(RemoteSession, self).prefill(token_ids)

        self._is_prefilling = True
        try:
            return self._recovering(prefill)
        finally:
            self._is_prefilling = False

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
        attempt = self._reselect_once
        for _ in range(_MAX_RECOVERIES):
            try:
                attempt()
                return
            except RankLostError:
                attempt = self._reselect_with_new_ranks
            except ServerLostError:
                if self._is_prefilling:
                    raise
                self._reset()
                attempt = self._reselect_anew
        attempt()

    def close(self) -> None:
        """Ends the request on the server, and the session. A second call does nothing."""
        if not self._return_attention.alive:
            return
        try:
            self._remote.close()
        finally:
            super().close()
            self._close_ranks()

    def _close_ranks(self) -> None:
        if self.ranks is not None:
            self.ranks.close()

    @property
    def source_kind(self) -> SourceKind:
        """What uploads read."""
        return SourceKind.CPU_COPY if self.is_copying else SourceKind.SOURCE_ONLY

    @property
    def metadata_cost(self) -> Term:
        """What telling the server takes is not measured."""
        return UNMEASURED

    @property
    def num_copy_blocks(self) -> int:
        """Blocks of the compaction area: as many as one upload can bring, in all layers."""
        if not self.is_copying:
            return 0
        return self.geometry.num_rows * self.runtime.policy.max_upload

    @property
    def _remote(self) -> RemoteVerifier:
        verifier = self.verifier
        if not isinstance(verifier, RemoteVerifier):
            raise TypeError(f"`verifier` is a {type(verifier).__name__}; expected RemoteVerifier")
        return verifier

    def _new_verifier(self) -> Verifier:
        return RemoteVerifier(self)

    def _recovering(self, work: Callable[[], Answer]) -> Answer:
        def again() -> Answer:
            if not self._is_prefilling:
                self._prefill_confirmed()
                self.reselect()
            return work()

        attempt = work
        for _ in range(_MAX_RECOVERIES):
            try:
                return attempt()
            except ServerLostError:
                self._reset()
                attempt = again
        return attempt()

    def _reselect_once(self) -> None:
        super().reselect()
        self._remote.transfers.acknowledge()

    def _reselect_anew(self) -> None:
        self._prefill_confirmed()
        self._reselect_once()

    def _reselect_with_new_ranks(self) -> None:
        self._replace_ranks()
        self._reselect_once()

    def _reset(self) -> None:
        """Shakes hands again; nothing is resident from now on."""
        self._remote.connect()
        self._forget_residency()
        self.num_recoveries += 1

    def _prefill_confirmed(self) -> None:
        """Has the confirmed tokens prefilled anew; a full plan from their scores is to follow."""
        self.cache.rollback(self.cache.get_seq_length() - self.num_tokens)
        self.verifier.prefill(self._context)

    def _replace_ranks(self) -> None:
        """Starts lost ranks anew; their pools are empty, so a full plan is to follow.

        Raises:
            RankLostError: one does not start.
            ServerLostError: the memory that they are to read is gone with its server.
        """
        if self.ranks is not None:
            try:
                self.ranks.group.replace_lost()
            except RankRefusedError as error:
                raise ServerLostError(str(error)) from error
        self._forget_residency()
        self._remote.attach()

    def _forget_residency(self) -> None:
        """Begins anew with empty stores; what was counted so far stays, as the course does."""
        lost, self.runtime = self.runtime, self._new_runtime()
        self.runtime.metrics = lost.metrics
        self.runtime.num_selections = lost.num_selections

    def _new_resident(self) -> ResidentKV:
        if self.num_ranks == 1:
            return super()._new_resident()
        self.ranks = ResidentRanks(self.sizes.shape, self.num_ranks)
        return self.ranks.start(self.runtime.num_physical_blocks)
