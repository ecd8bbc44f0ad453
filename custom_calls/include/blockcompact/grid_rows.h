// Row checks of a grid: what CheckRows does, one thread a row, without a word to the host.
#pragma once

#include <cstdint>

#include "blockcompact/grid_memory.h"
#include "blockcompact/host_device.h"
#include "blockcompact/rows.h"
#include "blockcompact/status.h"

namespace blockcompact {

// The first fault as one number: phase, row, code. The least one is the one to report.
using GridFault = unsigned long long;  // NOLINT: the type that atomicMin takes
inline constexpr GridFault kNoGridFault = ~GridFault{0};
inline constexpr int32_t kNoOwner = 0x7f7f7f7f;  // all bytes 0x7f, as memset leaves them

// Rows of a call on the grid. `fault` is read by the threads that move: a refused call moves
// nothing, one without `fault` was checked before. Null block columns stand for the row's own
// number. `owner` is [num_layers,
// num_to_blocks]: the first row that writes a block.
struct GridRows {
  Rows rows;
  RowLimits limits;
  GridFault* fault = nullptr;
  int32_t* owner = nullptr;

  BLOCKCOMPACT_HOST_DEVICE bool is_refused() const {
    return fault != nullptr && *fault != kNoGridFault;
  }
  BLOCKCOMPACT_HOST_DEVICE int64_t from_block_of(int64_t row) const {
    return rows.from_block == nullptr ? row : rows.from_block[row];
  }
  BLOCKCOMPACT_HOST_DEVICE bool is_hole(int64_t row) const { return from_block_of(row) == kHole; }
  BLOCKCOMPACT_HOST_DEVICE int64_t layer_of(int64_t row) const {
    return rows.layer == nullptr ? 0 : rows.layer[row];
  }
  BLOCKCOMPACT_HOST_DEVICE int64_t to_block_of(int64_t row) const {
    return rows.to_block == nullptr ? row : rows.to_block[row];
  }
  BLOCKCOMPACT_HOST_DEVICE int64_t valid_tokens_of(int64_t row) const {
    return rows.valid_tokens == nullptr ? limits.block_tokens : rows.valid_tokens[row];
  }
  BLOCKCOMPACT_HOST_DEVICE int32_t* owner_of(int64_t layer, int64_t block) const {
    return owner + layer * limits.num_to_blocks + block;
  }
};

BLOCKCOMPACT_HOST_DEVICE inline GridFault FaultAt(int64_t row, StatusCode code) {
  const bool is_late =
      code == StatusCode::kDuplicateDestination;  // after all faults of single rows
  return (is_late ? GridFault{1} << 62 : 0) | static_cast<GridFault>(row) << 8 |
         static_cast<GridFault>(code);
}

BLOCKCOMPACT_HOST_DEVICE inline bool IsIn(int64_t value, int64_t limit) {
  return value >= 0 && value < limit;
}

BLOCKCOMPACT_HOST_DEVICE inline StatusCode CheckGridRow(const GridRows& grid, int64_t row) {
  const Rows& rows = grid.rows;
  const RowLimits& limits = grid.limits;
  const bool has_to_block = rows.to_block != nullptr;
  if (has_to_block && grid.is_hole(row) != (rows.to_block[row] == kHole)) {
    return StatusCode::kPartialHole;
  }
  if (grid.is_hole(row)) return StatusCode::kOk;
  if (!IsIn(grid.layer_of(row), limits.num_layers)) return StatusCode::kLayerOutOfRange;
  if (!IsIn(grid.from_block_of(row), limits.num_from_blocks)) {
    return StatusCode::kFromBlockOutOfRange;
  }
  if (has_to_block && !IsIn(rows.to_block[row], limits.num_to_blocks)) {
    return StatusCode::kToBlockOutOfRange;
  }
  if (rows.valid_tokens != nullptr && !IsIn(rows.valid_tokens[row], limits.block_tokens + 1)) {
    return StatusCode::kValidTokensOutOfRange;
  }
  return StatusCode::kOk;
}

// First launch: faults of single rows, and who is first to write each block.
struct MarkRowBody {
  GridRows grid;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t) const {
    const StatusCode code = CheckGridRow(grid, row);
    if (code != StatusCode::kOk) {
      AtomicMin(grid.fault, FaultAt(row, code));
    } else if (grid.owner != nullptr && !grid.is_hole(row)) {
      AtomicMin(grid.owner_of(grid.layer_of(row), grid.to_block_of(row)),
                static_cast<int32_t>(row));
    }
  }
};

// Second launch: rows that write a block which an earlier row writes.
struct FindDuplicateBody {
  GridRows grid;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t) const {
    if (grid.is_hole(row) || CheckGridRow(grid, row) != StatusCode::kOk) return;
    if (*grid.owner_of(grid.layer_of(row), grid.to_block_of(row)) < row) {
      AtomicMin(grid.fault, FaultAt(row, StatusCode::kDuplicateDestination));
    }
  }
};

// One thread: the status array that the call returns.
struct WriteStatusBody {
  const GridFault* fault;
  int32_t* status;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t, uint32_t) const {
    const bool is_ok = *fault == kNoGridFault;
    status[0] = is_ok ? 0 : static_cast<int32_t>(*fault & 0xff);
    status[1] = is_ok ? -1 : static_cast<int32_t>(*fault >> 8 & 0x7fffffff);
  }
};

// Runs the checks through `launch(body, num_rows, num_lanes)`, which returns 0 where it started.
// `fault` and `owner` hold kNoGridFault and kNoOwner before.
template <typename Launch>
auto LaunchRowChecks(const GridRows& grid, const Launch& launch) {
  auto error = launch(MarkRowBody{grid}, grid.rows.num_rows, int64_t{1});
  if (error == decltype(error){} && grid.owner != nullptr) {
    error = launch(FindDuplicateBody{grid}, grid.rows.num_rows, int64_t{1});
  }
  return error;
}

}  // namespace blockcompact
