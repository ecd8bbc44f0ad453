#include <algorithm>

#include "blockcompact/grid_dispatch.h"
#include "blockcompact/grid_serial.h"
#include "launch.h"

namespace blockcompact::cuda {
namespace {

#if defined(__CUDACC__)

constexpr uint32_t kThreads = 256;
constexpr int64_t kMaxGridRows = 65535;  // of gridDim.y; more rows are taken in turns

template <typename Body>
__global__ void __launch_bounds__(kThreads)
    RunGrid(const Body body, int64_t num_rows, uint32_t num_lanes) {
  const uint32_t first_lane = blockIdx.x * kThreads + threadIdx.x;
  for (int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
    for (uint32_t lane = first_lane; lane < num_lanes; lane += gridDim.x * kThreads) {
      body(row, lane);
    }
  }
}

// Rows with one lane each: the lanes of a grid are its rows.
template <typename Body>
__global__ void __launch_bounds__(kThreads) RunRows(const Body body, int64_t num_rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < num_rows) body(row, 0);
}

struct Launcher {
  cudaStream_t stream;

  template <typename Body>
  cudaError_t operator()(const Body& body, int64_t num_rows, int64_t num_lanes) const {
    if (num_rows <= 0 || num_lanes <= 0) return cudaSuccess;
    if (num_rows > INT32_MAX || num_lanes > INT32_MAX) return cudaErrorInvalidValue;
    if (num_lanes == 1) {
      RunRows<<<Blocks(num_rows), kThreads, 0, stream>>>(body, num_rows);
    } else {
      const dim3 blocks(Blocks(num_lanes), static_cast<uint32_t>(std::min(num_rows, kMaxGridRows)));
      RunGrid<<<blocks, kThreads, 0, stream>>>(body, num_rows, static_cast<uint32_t>(num_lanes));
    }
    return cudaGetLastError();
  }

  static uint32_t Blocks(int64_t num_threads) {
    return static_cast<uint32_t>((num_threads + kThreads - 1) / kThreads);
  }
};

#else  // a test of the device checks, on host memory

struct Launcher {
  cudaStream_t stream;

  template <typename Body>
  cudaError_t operator()(const Body& body, int64_t num_rows, int64_t num_lanes) const {
    SerialGrid{}(body, num_rows, num_lanes);
    return cudaSuccess;
  }
};

#endif

// Lanes and the offsets they stand for are 32-bit within a row.
bool IsTooLarge(const BlockShape& shape) { return shape.packed_row_bytes() > INT32_MAX; }

}  // namespace

cudaError_t CheckRows(const GridRows& grid, int32_t* status, cudaStream_t stream) {
  cudaError_t error = cudaMemsetAsync(grid.fault, 0xff, sizeof(GridFault), stream);
  if (error == cudaSuccess && grid.owner != nullptr) {
    const auto num_bytes = static_cast<size_t>(OwnerBytes(grid.limits));
    error = cudaMemsetAsync(grid.owner, 0x7f, num_bytes, stream);
  }
  if (error == cudaSuccess) error = LaunchRowChecks(grid, Launcher{stream});
  if (error != cudaSuccess) return error;
  return Launcher{stream}(WriteStatusBody{grid.fault, status}, 1, 1);
}

cudaError_t UnpackRows(PackedLayout layout, const GridPacked& from, const GridPlain& to,
                       const BlockShape& shape, const GridRows& grid, cudaStream_t stream) {
  if (IsTooLarge(shape)) return cudaErrorInvalidValue;
  return LaunchUnpack(layout, from, to, shape, grid, Launcher{stream});
}

cudaError_t PackRows(PackedLayout layout, const GridPlain& from, const GridPacked& to,
                     const BlockShape& shape, const GridRows& grid, cudaStream_t stream) {
  if (IsTooLarge(shape)) return cudaErrorInvalidValue;
  return LaunchPack(layout, from, to, shape, grid, Launcher{stream});
}

cudaError_t GatherRows(const GridPlain& from, const GridPlain& to, const BlockShape& shape,
                       const GridRows& grid, cudaStream_t stream) {
  if (IsTooLarge(shape)) return cudaErrorInvalidValue;
  return LaunchGather(from, to, shape, grid, Launcher{stream});
}

cudaError_t MoveBlocks(const GridMove& move, cudaStream_t stream) {
  return LaunchMove(move, Launcher{stream});
}

cudaError_t CheckKeys(const GridKeys& keys, int32_t* status, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(keys.fault, 0xff, sizeof(GridFault), stream);
  return error == cudaSuccess ? LaunchKeyChecks(keys, status, Launcher{stream}) : error;
}

cudaError_t ScoreBlocks(GridOrder order, const GridKeys& keys, const GridQueries& queries,
                        const GridScores& to, cudaStream_t stream) {
  return LaunchScores(order, keys, queries, to, Launcher{stream});
}

cudaError_t AttendBlocks(GridOrder order, const GridAttend& call, cudaStream_t stream) {
  return LaunchAttend(order, call, Launcher{stream});
}

}  // namespace blockcompact::cuda
