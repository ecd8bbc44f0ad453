// Kernels on a CUDA stream. Everything is asynchronous; pointers are those that the device reads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blockcompact/grid_attend.h"
#include "blockcompact/grid_moves.h"
#include "blockcompact/grid_rows.h"
#include "blockcompact/grid_scores.h"

namespace blockcompact::cuda {

// Scratch of one call, on the device. Bytes of `owner` for a call that writes blocks, else 0.
inline int64_t OwnerBytes(const RowLimits& limits) {
  return limits.num_layers * limits.num_to_blocks * static_cast<int64_t>(sizeof(int32_t));
}

// Checks all rows and writes the status, int32 [2]. Afterwards `grid.fault` refuses or lets pass
// the launches below, which come after it on the stream.
cudaError_t CheckRows(const GridRows& grid, int32_t* status, cudaStream_t stream);

// Packed rows, in device memory or in pinned host memory, into plain blocks: the reload of a pool,
// one launch for all rows of all layers.
cudaError_t UnpackRows(PackedLayout layout, const GridPacked& from, const GridPlain& to,
                       const BlockShape& shape, const GridRows& grid, cudaStream_t stream);

cudaError_t PackRows(PackedLayout layout, const GridPlain& from, const GridPacked& to,
                     const BlockShape& shape, const GridRows& grid, cudaStream_t stream);

// Plain blocks to plain blocks; see GatherBody.
cudaError_t GatherRows(const GridPlain& from, const GridPlain& to, const BlockShape& shape,
                       const GridRows& grid, cudaStream_t stream);

cudaError_t MoveBlocks(const GridMove& move, cudaStream_t stream);

// Checks the keys and writes the status, int32 [2], as CheckRows does for rows.
cudaError_t CheckKeys(const GridKeys& keys, int32_t* status, cudaStream_t stream);

cudaError_t ScoreBlocks(GridOrder order, const GridKeys& keys, const GridQueries& queries,
                        const GridScores& to, cudaStream_t stream);

cudaError_t AttendBlocks(GridOrder order, const GridAttend& call, cudaStream_t stream);

}  // namespace blockcompact::cuda
