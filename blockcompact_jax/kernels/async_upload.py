"""Uploads that run beside Python, with a completion event.

To memory of the host they run on a thread of the compiled module, to memory of a CUDA device on a
stream of its own, in one launch for all layers, after what the pool's owner has enqueued on its
stream so far.

An upload is checked and accepted when it is started: its pool has the next `ord` from then on, and
other calls go on with it at once. Until the upload's event is done, calls that read or write a
block it writes, or write a block it reads, are refused (`OPEN_TRANSFER`), in this pool and in any
other over the same memory. All other blocks are free to use, so a draft reads its resident blocks
while new ones arrive.
"""

import math
from typing import Any

import numpy as np

from blockcompact_jax.kernels._checks import check_column
from blockcompact_jax.kernels.host_calls import ord_array, upload_columns
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.pool_calls import layer_column
from blockcompact_jax.kernels.pools import RegisteredPool
from blockcompact_jax.kernels.results import AnyArray
from blockcompact_jax.kernels.status import raise_for_status


class UploadFailedError(RuntimeError):
    """An accepted upload did not complete; the blocks it writes hold unknown bytes."""


class UploadEvent:
    """Completion of one upload. Dropping it is safe: the upload and its leases go on without it.

    Attributes:
        ord_packed: uint32 `[1]` of the packed pool, as given.
        ord_plain: uint32 `[1]` of the plain pool for the next call, whether done or not.
    """

    def __init__(
        self, native_event: Any, *, name: str, ord_packed: AnyArray, ord_plain: AnyArray
    ) -> None:
        """Use `start_pool_upload`."""
        self._native_event = native_event
        self._name = name
        self.ord_packed = ord_packed
        self.ord_plain = ord_plain

    @property
    def is_done(self) -> bool:
        """Whether the upload has ended, completed or failed; its blocks and leases are let go."""
        return self._native_event.is_done()

    @property
    def error(self) -> str | None:
        """What went wrong, or None while nothing has."""
        return (self._native_event.error() or None) if self.is_done else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the bytes have arrived. Releases the GIL; may be called again.

        Args:
            timeout_s: Seconds to wait; None: as long as it takes.

        Raises:
            TimeoutError: Where the upload is still open after `timeout_s`.
            ValueError: Where `timeout_s` is no number of seconds.
            UploadFailedError: Where the upload failed.
        """
        if timeout_s is not None and not (math.isfinite(timeout_s) and 0 <= timeout_s <= 1e9):
            raise ValueError(
                f"`timeout_s` is {timeout_s}; expected seconds in [0, 1e9], or None to wait "
                "without a limit"
            )
        if not self._native_event.wait(timeout_s):
            raise TimeoutError(f"{self._name} is still open after {timeout_s} s; wait again")
        if self.error is not None:
            raise UploadFailedError(
                f"{self._name} failed: {self.error}. Abort the operation and do not read the "
                "blocks it writes"
            )

    def wait_in_stream(self) -> None:
        """Makes the stream of the plain pool's owner wait for the bytes, not the caller.

        What the owner enqueues there from now on sees them. The stream of a packed pool of the
        device waits too, so that its owner may write the rows again. Calls of this package still
        refuse the blocks until the upload is done. On the host there is no stream: the same as
        `wait`.

        Raises:
            UploadFailedError: On the host, where the upload failed.
            RuntimeError: Where the device refuses.
        """
        if not self._native_event.wait_in_stream():
            self.wait()

    def __repr__(self) -> str:
        state = "open" if not self.is_done else "done" if self.error is None else "failed"
        return f"<{self._name}, {state}>"


def start_pool_upload(  # noqa: PLR0917
    ord_packed: AnyArray,
    ord_plain: AnyArray,
    layer: AnyArray | int,
    source_block: AnyArray,
    physical_block: AnyArray,
    valid_tokens: AnyArray | None = None,
    *,
    packed_pool: RegisteredPool,
    plain_pool: RegisteredPool,
    lease: object = None,
) -> UploadEvent:
    """Starts `host_pool_upload` beside the caller. Uploads run one after another.

    The columns are copied. Both pools may be closed while the upload is open: their memory is held
    until it is done.

    Args:
        ord_packed: As `pool_upload`.
        ord_plain: As `pool_upload`.
        layer: As `pool_upload`.
        source_block: As `pool_upload`.
        physical_block: As `pool_upload`.
        valid_tokens: As `pool_upload`.
        packed_pool: As `pool_upload`.
        plain_pool: As `pool_upload`.
        lease: Held until the upload is done, e.g. what keeps the source blocks from reuse.

    Raises:
        ValueError: As `pool_upload`.
        KernelStatusError: Where a value is refused: at once, and nothing will move.
        RuntimeError: Where a device refuses to take the upload.
    """
    columns = upload_columns(
        ord_packed,
        ord_plain,
        layer,
        source_block,
        physical_block,
        valid_tokens,
        packed_pool=packed_pool,
        plain_pool=plain_pool,
    )
    next_ord, status, native_event = load_native().start_pool_upload(
        packed_pool.pool_id,
        int(ord_packed[0]),
        plain_pool.pool_id,
        int(ord_plain[0]),
        *columns.values(),
        lease,
    )
    name = f"upload from pool {packed_pool.pool_id} to pool {plain_pool.pool_id}"
    raise_for_status(status, call=name, **columns)
    return UploadEvent(
        native_event,
        name=f"{name} (ord {next_ord})",
        ord_packed=np.array(ord_packed),
        ord_plain=ord_array(next_ord),
    )


def check_not_open(
    pool: RegisteredPool, layer: AnyArray | int, block: AnyArray, *, is_write: bool
) -> None:
    """Refuses blocks that an upload has open, before the owner of the memory touches them itself.

    Calls of ours check this; an engine that writes its own tensor asks here first. What starts
    after the check is the caller's to keep apart.

    Args:
        pool: The registration of the memory.
        layer: int32 `[num_rows]`, or one int for all rows.
        block: int32 `[num_rows]`, blocks of `pool` (physical blocks of a plain pool, source blocks
            of a packed one); HOLE entries are left out.
        is_write: Whether the blocks are to be written, else read.

    Raises:
        KernelStatusError: Where an open upload writes one of the blocks, or reads one that is to be
            written; and where the pool is closed.
        ValueError: For shapes and dtypes.
    """
    num_rows = check_column("block", block)
    columns = {
        "layer": np.ascontiguousarray(layer_column(layer, num_rows)),
        "block": np.ascontiguousarray(block),
    }
    status = load_native().check_not_open(pool.pool_id, is_write, *columns.values())
    raise_for_status(status, call=f"access to pool {pool.pool_id}", **columns)
