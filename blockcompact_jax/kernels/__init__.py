"""Kernel calls on KV blocks: packed layouts, registered pools, JAX-owned pools, attention."""

from blockcompact_jax.kernels.arrays import block_move as block_move
from blockcompact_jax.kernels.arrays import gather as gather
from blockcompact_jax.kernels.arrays import pack as pack
from blockcompact_jax.kernels.arrays import unpack as unpack
from blockcompact_jax.kernels.arrays import unpack_scatter as unpack_scatter
from blockcompact_jax.kernels.async_upload import UploadEvent as UploadEvent
from blockcompact_jax.kernels.async_upload import UploadFailedError as UploadFailedError
from blockcompact_jax.kernels.async_upload import check_not_open as check_not_open
from blockcompact_jax.kernels.async_upload import start_pool_upload as start_pool_upload
from blockcompact_jax.kernels.attend_types import AttendSegment as AttendSegment
from blockcompact_jax.kernels.attend_types import HostAttendOutputs as HostAttendOutputs
from blockcompact_jax.kernels.attend_types import PoolAttendResult as PoolAttendResult
from blockcompact_jax.kernels.attend_types import RowsAt as RowsAt
from blockcompact_jax.kernels.block_scores import PoolScoreResult as PoolScoreResult
from blockcompact_jax.kernels.block_scores import PoolSummaryResult as PoolSummaryResult
from blockcompact_jax.kernels.block_scores import ScoreResult as ScoreResult
from blockcompact_jax.kernels.block_scores import ScoreSequence as ScoreSequence
from blockcompact_jax.kernels.block_scores import SummaryResult as SummaryResult
from blockcompact_jax.kernels.block_scores import pool_score_blocks as pool_score_blocks
from blockcompact_jax.kernels.block_scores import pool_summarize_blocks as pool_summarize_blocks
from blockcompact_jax.kernels.block_scores import score_blocks as score_blocks
from blockcompact_jax.kernels.block_scores import summarize_blocks as summarize_blocks
from blockcompact_jax.kernels.host_attend import has_open_mp_threads as has_open_mp_threads
from blockcompact_jax.kernels.host_attend import host_pool_attend as host_pool_attend
from blockcompact_jax.kernels.host_attend import host_pool_attend_at as host_pool_attend_at
from blockcompact_jax.kernels.host_attend import num_threads as num_threads
from blockcompact_jax.kernels.host_block_scores import (
    host_pool_score_blocks as host_pool_score_blocks,
)
from blockcompact_jax.kernels.host_block_scores import (
    host_pool_score_sequences_at as host_pool_score_sequences_at,
)
from blockcompact_jax.kernels.host_block_scores import (
    host_pool_summarize_blocks as host_pool_summarize_blocks,
)
from blockcompact_jax.kernels.host_calls import host_pool_block_move as host_pool_block_move
from blockcompact_jax.kernels.host_calls import host_pool_gather as host_pool_gather
from blockcompact_jax.kernels.host_calls import host_pool_pack as host_pool_pack
from blockcompact_jax.kernels.host_calls import host_pool_upload as host_pool_upload
from blockcompact_jax.kernels.host_estimate import EstimateSequence as EstimateSequence
from blockcompact_jax.kernels.host_estimate import EstimateStatus as EstimateStatus
from blockcompact_jax.kernels.host_estimate import (
    host_pool_choose_by_estimate_at as host_pool_choose_by_estimate_at,
)
from blockcompact_jax.kernels.layouts import Layout as Layout
from blockcompact_jax.kernels.layouts import UnsupportedLayoutError as UnsupportedLayoutError
from blockcompact_jax.kernels.layouts import check_layout as check_layout
from blockcompact_jax.kernels.layouts import packed_k_offsets as packed_k_offsets
from blockcompact_jax.kernels.layouts import packed_v_offsets as packed_v_offsets
from blockcompact_jax.kernels.ledger import NativeCell as NativeCell
from blockcompact_jax.kernels.native import NativeModuleError as NativeModuleError
from blockcompact_jax.kernels.native import build_info as build_info
from blockcompact_jax.kernels.pool_attend import pool_attend as pool_attend
from blockcompact_jax.kernels.pool_calls import pool_block_move as pool_block_move
from blockcompact_jax.kernels.pool_calls import pool_gather as pool_gather
from blockcompact_jax.kernels.pool_calls import pool_pack as pool_pack
from blockcompact_jax.kernels.pool_calls import pool_upload as pool_upload
from blockcompact_jax.kernels.pools import PackedStrides as PackedStrides
from blockcompact_jax.kernels.pools import PlainStrides as PlainStrides
from blockcompact_jax.kernels.pools import PoolClosedError as PoolClosedError
from blockcompact_jax.kernels.pools import PoolShape as PoolShape
from blockcompact_jax.kernels.pools import RegisteredPool as RegisteredPool
from blockcompact_jax.kernels.rank import NativeOperations as NativeOperations
from blockcompact_jax.kernels.rank import RankOrder as RankOrder
from blockcompact_jax.kernels.rank import rank as rank
from blockcompact_jax.kernels.results import GatherResult as GatherResult
from blockcompact_jax.kernels.results import PoolGatherResult as PoolGatherResult
from blockcompact_jax.kernels.results import PoolMoveResult as PoolMoveResult
from blockcompact_jax.kernels.results import PoolPackResult as PoolPackResult
from blockcompact_jax.kernels.results import PoolUploadResult as PoolUploadResult
from blockcompact_jax.kernels.results import WriteResult as WriteResult
from blockcompact_jax.kernels.staging import StagingBuffer as StagingBuffer
from blockcompact_jax.kernels.staging import StagingInUseError as StagingInUseError
from blockcompact_jax.kernels.status import KernelCode as KernelCode
from blockcompact_jax.kernels.status import KernelStatusError as KernelStatusError
from blockcompact_jax.kernels.status import PoolCopiedError as PoolCopiedError
from blockcompact_jax.kernels.status import raise_for_status as raise_for_status
