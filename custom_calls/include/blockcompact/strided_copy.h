// Copy of a small strided box whose innermost run is contiguous on both sides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "blockcompact/streaming.h"

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

// Copies of one plan, kMaxCopyJobs at a time: at each offset in the order in which they were added,
// so a later one may write the block that an earlier one reads.
class CopyBatch {
 public:
  // `plan` is kept by reference.
  CopyBatch(const StridedCopy& plan, CopyStreams copy_streams)
      : plan_(plan), copy_streams_(copy_streams) {}

  void Add(const CopyJob& job);
  void Flush();

 private:
  const StridedCopy& plan_;
  CopyStreams copy_streams_;
  CopyJob jobs_[kMaxCopyJobs];
  int64_t num_jobs_ = 0;
};

// Writes zeros where RunStridedCopy would write.
void ZeroStridedDestination(const StridedCopy& plan, std::byte* to);

}  // namespace blockcompact
