// Copy of a small strided box whose innermost run is contiguous on both sides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace blockcompact {

struct CopyDim {
  int64_t extent = 1;
  int64_t from_stride_bytes = 0;
  int64_t to_stride_bytes = 0;
};

struct StridedCopy {
  std::array<CopyDim, 3> dims;  // outermost first; unused ones have extent 1
  int64_t run_bytes = 0;
};

// Sorts the dimensions by destination stride and joins those that are contiguous on both sides.
StridedCopy PlanStridedCopy(std::array<CopyDim, 3> dims, int64_t run_bytes);

// Source and destination must not overlap.
void RunStridedCopy(const StridedCopy& plan, const std::byte* from, std::byte* to);

// Writes zeros where RunStridedCopy would write.
void ZeroStridedDestination(const StridedCopy& plan, std::byte* to);

}  // namespace blockcompact
