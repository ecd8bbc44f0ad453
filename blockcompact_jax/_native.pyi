"""Compiled registry, host calls and FFI handlers. Use `blockcompact_jax.kernels` instead."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def build_info() -> dict[str, str | list[str]]: ...
def ffi_targets() -> dict[str, object]: ...
def force_impl(name: str) -> None: ...
def force_streaming_from(num_bytes: int) -> None: ...
def register_plain(
    *,
    pointers: Sequence[int],
    size_bytes: int,
    num_layers: int,
    num_blocks: int,
    shape: Sequence[int],
    stride_bytes: Sequence[int],
    is_writable: bool,
    stream: tuple[int, int],
    keepalive: object,
) -> int: ...
def register_packed(
    *,
    pointers: Sequence[int],
    size_bytes: int,
    num_layers: int,
    num_blocks: int,
    shape: Sequence[int],
    layout: int,
    stride_bytes: Sequence[int],
    is_writable: bool,
    stream: tuple[int, int],
    keepalive: object,
) -> int: ...
def unregister(pool_id: int) -> bool: ...
def num_pools() -> int: ...
def pin_pool(pool_id: int) -> bool: ...
def pool_ord(pool_id: int) -> int | None: ...
def pool_pack(
    plain_pool: int,
    ord_plain: int,
    packed_pool: int,
    ord_packed: int,
    layer: NDArray[np.int32],
    plain_block: NDArray[np.int32],
    source_block: NDArray[np.int32],
) -> tuple[int, NDArray[np.int32]]: ...
def pool_upload(
    packed_pool: int,
    ord_packed: int,
    plain_pool: int,
    ord_plain: int,
    layer: NDArray[np.int32],
    source_block: NDArray[np.int32],
    physical_block: NDArray[np.int32],
    valid_tokens: NDArray[np.int32],
) -> tuple[int, NDArray[np.int32]]: ...
def start_pool_upload(
    packed_pool: int,
    ord_packed: int,
    plain_pool: int,
    ord_plain: int,
    layer: NDArray[np.int32],
    source_block: NDArray[np.int32],
    physical_block: NDArray[np.int32],
    valid_tokens: NDArray[np.int32],
    lease: object,
) -> tuple[int, NDArray[np.int32], UploadEvent | None]: ...
def num_open_transfers(pool_id: int) -> tuple[int, int]: ...
def check_not_open(
    pool_id: int, is_write: bool, layer: NDArray[np.int32], block: NDArray[np.int32]
) -> NDArray[np.int32]: ...
def hold_uploads(is_held: bool, fault: str = "") -> None: ...
def set_device_runtime(runtime: object | None) -> object | None: ...

class EmulatedDevice:
    runtime: object
    def __init__(self) -> None: ...
    def add_memory(self, address: int, num_bytes: int, device: int) -> None: ...
    def remove_memory(self, address: int) -> None: ...
    def hold(self, is_held: bool) -> None: ...
    def fail_next_wait(self, fault: str) -> None: ...
    def run_all(self) -> None: ...
    def num_pending(self) -> int: ...

class UploadEvent:
    def is_done(self) -> bool: ...
    def wait(self, timeout_s: float | None) -> bool: ...
    def wait_in_stream(self) -> bool: ...
    def error(self) -> str: ...

def pool_block_move(
    pool: int,
    ord: int,
    layer: NDArray[np.int32],
    from_block: NDArray[np.int32],
    to_block: NDArray[np.int32],
) -> tuple[int, NDArray[np.int32]]: ...
def pool_gather(
    pool: int,
    ord: int,
    layer: NDArray[np.int32],
    physical_block: NDArray[np.int32],
    out: NDArray[np.generic],
    is_token_contiguous: bool,
) -> NDArray[np.int32]: ...
def pool_attend(
    segments: tuple[tuple[int, int, int, NDArray[np.int32], int], ...],
    shape: tuple[int, int, int, int],
    scale: float,
    window_tokens: int,
    queries: tuple[int, int, int],
    out: tuple[int, int, int],
    block_mass: tuple[int, int, int] | None,
    max_blocks: int,
    log_sum_exp: int,
    num_threads: int | None,
    is_on_open_mp: bool,
    is_on_device: bool,
) -> tuple[int, int]: ...
def pool_score_blocks(
    pool: int,
    ord: int,
    layer: int,
    block_table: NDArray[np.int32],
    num_keys: int,
    queries: NDArray[np.generic],
    scale: float,
    reduction: int,
    scores: NDArray[np.float32],
    num_threads: int | None,
) -> tuple[int, int]: ...
def pool_score_sequences(
    pool: int,
    ord: int,
    layer: int,
    sequences: Sequence[tuple[NDArray[np.generic], int, tuple[int, int, int], int]],
    shape: tuple[int, int, int, int],
    scale: float,
    reduction: int,
    row_stride: int,
    is_on_open_mp: bool,
    is_on_device: bool,
) -> tuple[int, int]: ...
def pool_choose_by_estimate(
    moments: tuple[int, int, int],
    keys: tuple[int, int, int],
    sequences: Sequence[tuple[NDArray[np.generic] | int, ...]],
    tokens: Sequence[int],
    row: int,
    queries: tuple[int, int, int],
    shape: tuple[int, int, int, int, int, int],
    scale: float,
    is_on_open_mp: bool,
) -> tuple[int, int, int, int]: ...
def pool_summarize_blocks(
    pool: int,
    ord: int,
    layer: int,
    block_table: NDArray[np.int32],
    num_keys: int,
    min_keys: NDArray[np.generic],
    max_keys: NDArray[np.generic],
    num_threads: int | None,
) -> tuple[int, int]: ...
def are_best(
    scores: object,
    num_candidates: int,
    listed: object,
    num_listed: object,
    num_wanted: NDArray[np.int32],
    num_sinks: int,
) -> bool | None: ...
def address_of(array: NDArray[np.generic]) -> int: ...
def num_threads() -> int: ...
def has_open_mp_threads() -> bool: ...

class Ledger:
    def __init__(
        self, columns: Sequence[NDArray[np.int32] | NDArray[np.bool_]], num_ranks: int
    ) -> None: ...
    def apply(self, rows: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]: ...
    def undo(self) -> None: ...
