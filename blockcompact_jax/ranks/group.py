"""The rank processes of one engine: started, asked, timed, replaced."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Final

import numpy as np
from jaxtyping import Int32
from pydantic import ValidationError

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.ledger.handles import OperationKey
from blockcompact_jax.remote.wire import KeyWire

from . import wire
from .shares import HeadShare

WORKER_COMMAND: Final = (sys.executable, "-P", "-m", "blockcompact_jax.ranks.worker")
_START_SECONDS: Final = 60.0
"""A new process imports first."""

Landed = Callable[[int, OperationKey], None]
"""Told that a rank says that its part of an operation is done; may be told so more than once."""


class RankLostError(CompactionError):
    """Ranks died, or were silent for too long and were ended. What they held is gone.

    Attributes:
        ranks: Which.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        names = ", ".join(map(str, self.ranks))
        super().__init__(
            f"Rank {names} died or did not answer in time; nothing was committed. Replace it and "
            "make a full plan."
        )


class RankRefusedError(CompactionError):
    """A rank refused a message, and changed nothing."""


@dataclass
class _Member:
    process: subprocess.Popen[bytes]
    connection: Connection


class RankGroup:
    """Rank processes, one for each share of the KV heads.

    One message is at work at a time, on all ranks. When a call has returned or raised, every rank
    has answered or is dead: no copy of an earlier call can still land.

    Attributes:
        shares: Which KV heads each rank has.
        num_replaced: Lost ranks that were started anew.
    """

    def __init__(
        self,
        shares: Sequence[HeadShare],
        *,
        patience_seconds: float = 30.0,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        """Starts nothing yet; `open_pool` does.

        Args:
            shares: Which KV heads each rank has.
            patience_seconds: A rank that is silent for longer is lost.
            command: What starts a rank; the number of its socket is added.
        """
        self.shares = tuple(shares)
        self.num_replaced = 0
        self._patience_seconds = patience_seconds
        self._command = tuple(command)
        self._members: dict[int, _Member] = {}
        self._pool: wire.PoolWire | None = None
        self._source: wire.OpenSourceWire | None = None
        self._newest_message_id = 0

    @property
    def pids(self) -> dict[int, int]:
        """Process ID of every rank that was not lost."""
        return {rank: member.process.pid for rank, member in sorted(self._members.items())}

    def open_pool(self, pool: wire.PoolWire) -> None:
        """Starts every rank with its part of a resident pool, which it clears.

        Raises:
            RankLostError: Some did not start.
            RankRefusedError: One cannot open the memory.
        """
        self._pool = pool
        self._start(self.shares)

    def open_source(self, pool: wire.PoolWire, layout: int) -> None:
        """Names the packed pool that transfers read from now on.

        A rank that is found dead is reported by the next transfer; its successor opens this source.

        Raises:
            RankRefusedError: One cannot open the memory.
        """
        self._source = wire.OpenSourceWire.model_validate({"pool": pool, "layout": layout})
        with suppress(RankLostError):
            self._exchange(self._source, self._all_ranks())

    def transfer(
        self,
        key: OperationKey,
        columns: Mapping[str, Int32[np.ndarray, " upload_row"]],
        landed: Landed,
    ) -> None:
        """Has every rank move its heads of some rows, and waits for all.

        Args:
            key: The operation.
            columns: layer_row, source_block, physical_block, valid_tokens; without rows the ranks
                only confirm the operation.
            landed: Told of every answer, also of one that comes twice or late.

        Raises:
            RankLostError: A rank is gone; what the others moved lies in blocks nobody reads.
            RankRefusedError: A rank refused the rows.
        """
        rows = {name: values.tolist() for name, values in columns.items()}
        message = wire.TransferWire(key=KeyWire(**vars(key)), **rows)
        self._exchange(message, self._all_ranks(), landed)

    def replace_lost(self) -> None:
        """Starts the lost ranks anew; their pools are empty. What raises may be tried again.

        Raises:
            RankLostError: One does not start.
            RankRefusedError: One cannot open the memory.
        """
        lost = [share for share in self.shares if share.rank not in self._members]
        self._start(lost)
        self.num_replaced += len(lost)

    def close(self) -> None:
        """Ends every rank."""
        for rank in list(self._members):
            self._end(rank)

    def _all_ranks(self) -> set[int]:
        return {share.rank for share in self.shares}

    def _start(self, shares: Sequence[HeadShare]) -> None:
        if self._pool is None:
            raise CompactionError("No pool was named; call `open_pool` first.")
        try:
            for share in shares:
                self._members[share.rank] = self._spawn()
            for share in shares:
                message = wire.OpenPoolWire(
                    pool=self._pool,
                    first_kv_head=share.first_kv_head,
                    num_kv_heads=share.num_kv_heads,
                )
                self._exchange(message, {share.rank}, patience_seconds=_START_SECONDS)
            if self._source is not None:
                self._exchange(self._source, {share.rank for share in shares})
        except BaseException:
            # A rank that has not opened all would refuse every transfer: the next try starts it.
            for share in shares:
                if share.rank in self._members:
                    self._end(share.rank)
            raise

    def _spawn(self) -> _Member:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", max(1, int(self._patience_seconds)), 0)
        # A rank that was stopped with half a message on its way must not stop us as well.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        with theirs:
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the engine; a rank ends when the engine hangs up.
            )
        return _Member(process, Connection(ours.detach()))

    def _exchange(
        self,
        message: wire.OpenPoolWire | wire.OpenSourceWire | wire.TransferWire,
        ranks: Collection[int],
        landed: Landed | None = None,
        *,
        patience_seconds: float | None = None,
    ) -> None:
        """Sends a message to ranks and hears them until all have answered or are dead."""
        self._newest_message_id += 1
        message = message.model_copy(update={"message_id": self._newest_message_id})
        body = message.model_dump_json().encode()
        lost = set(ranks) - set(self._members)
        waiting = set(ranks) - lost
        refusals: list[str] = []
        try:
            for rank in sorted(waiting):
                if not self._send(rank, body):
                    lost.add(rank)
            deadline = time.monotonic() + (patience_seconds or self._patience_seconds)
            while waiting - lost:
                ready = self._wait(waiting - lost, deadline)
                lost |= set() if ready else waiting - lost
                for rank in ready:
                    answer = self._receive(rank)
                    if answer is None:
                        lost.add(rank)
                        continue
                    if answer.message_id == message.message_id:
                        waiting.discard(rank)
                    if answer.refusal:
                        refusals.append(f"Rank {rank}: {answer.refusal}")
                    elif landed is not None and answer.key is not None:
                        landed(rank, answer.key.to_message())
        finally:
            for rank in waiting:
                self._end(rank)
        if lost:
            raise RankLostError(lost)
        if refusals:
            raise RankRefusedError(" ".join(refusals))

    def _send(self, rank: int, body: bytes) -> bool:
        try:
            self._members[rank].connection.send_bytes(body)
        except OSError:
            return False
        return True

    def _receive(self, rank: int) -> wire.AnswerWire | None:
        """Reads an answer; None from a rank that is gone or talks nonsense."""
        try:
            body = self._members[rank].connection.recv_bytes(wire.MAX_MESSAGE_BYTES)
            return wire.AnswerWire.model_validate_json(body)
        except (EOFError, OSError, ValidationError):
            return None

    def _wait(self, ranks: Collection[int], deadline: float) -> list[int]:
        """Returns ranks that have something to say, their end included; none at the deadline."""
        rank_by_connection = {self._members[rank].connection: rank for rank in ranks}
        ready = wait(rank_by_connection, max(0.0, deadline - time.monotonic()))
        return [rank for connection, rank in rank_by_connection.items() if connection in ready]

    def _end(self, rank: int) -> None:
        """Kills a rank and waits until it is dead: then no copy of it can land any more."""
        member = self._members.pop(rank)
        member.connection.close()
        member.process.kill()
        member.process.wait()
