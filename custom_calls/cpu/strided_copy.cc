#include "blockcompact/strided_copy.h"

#include <algorithm>
#include <cstring>

namespace blockcompact {

StridedCopy PlanStridedCopy(std::array<CopyDim, 3> dims, int64_t run_bytes) {
  for (CopyDim& dim : dims) {
    if (dim.extent == 1) dim = CopyDim{};  // its strides say nothing
  }
  std::stable_sort(dims.begin(), dims.end(), [](const CopyDim& a, const CopyDim& b) {
    return a.to_stride_bytes > b.to_stride_bytes;
  });
  StridedCopy plan{dims, run_bytes};
  // A unit dimension sorts last (stride 0); join inward-out over those that carry data.
  for (int i = 2; i >= 0; --i) {
    CopyDim& dim = plan.dims[static_cast<size_t>(i)];
    if (dim.extent == 1) continue;
    if (dim.from_stride_bytes != plan.run_bytes || dim.to_stride_bytes != plan.run_bytes) break;
    plan.run_bytes *= dim.extent;
    dim = CopyDim{};
  }
  return plan;
}

namespace {

template <typename Visit>
void ForEachRun(const StridedCopy& plan, Visit visit) {
  const auto& [outer, middle, inner] = plan.dims;
  for (int64_t i = 0; i < outer.extent; ++i) {
    for (int64_t j = 0; j < middle.extent; ++j) {
      for (int64_t k = 0; k < inner.extent; ++k) {
        visit(i * outer.from_stride_bytes + j * middle.from_stride_bytes +
                  k * inner.from_stride_bytes,
              i * outer.to_stride_bytes + j * middle.to_stride_bytes + k * inner.to_stride_bytes);
      }
    }
  }
}

// Bytes up to the next line.
int64_t LeadBytes(const std::byte* to) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLineBytes);
  return (kLineBytes - address) % kLineBytes;
}

void CopyPart(const CopyJob* runs, int64_t num_runs, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < num_runs; ++i) {
    std::memcpy(runs[i].to + begin, runs[i].from + begin, static_cast<size_t>(end - begin));
  }
}

// Streams what lies on whole lines, where the runs have their lines at the same offsets.
void CopyRuns(CopyStreams copy_streams, const CopyJob* runs, int64_t num_runs, int64_t run_bytes) {
  const int64_t lead_bytes = LeadBytes(runs[0].to);
  const bool is_in_step = std::all_of(
      runs, runs + num_runs, [&](const CopyJob& run) { return LeadBytes(run.to) == lead_bytes; });
  if (!is_in_step || run_bytes < lead_bytes + kStreamStepBytes) {
    return CopyPart(runs, num_runs, 0, run_bytes);
  }
  const int64_t num_bytes = (run_bytes - lead_bytes) / kStreamStepBytes * kStreamStepBytes;
  CopyPart(runs, num_runs, 0, lead_bytes);
  CopyPart(runs, num_runs, lead_bytes + num_bytes, run_bytes);
  CopyJob lines[kMaxCopyJobs];
  for (int64_t i = 0; i < num_runs; ++i) {
    lines[i] = {runs[i].from + lead_bytes, runs[i].to + lead_bytes};
  }
  copy_streams(lines, num_runs, num_bytes);
}

}  // namespace

void RunStridedCopy(const StridedCopy& plan, const std::byte* from, std::byte* to) {
  const size_t run_bytes = static_cast<size_t>(plan.run_bytes);
  ForEachRun(plan, [&](int64_t from_bytes, int64_t to_bytes) {
    std::memcpy(to + to_bytes, from + from_bytes, run_bytes);
  });
}

void CopyBatch::Add(const CopyJob& job) {
  if (num_jobs_ == kMaxCopyJobs) Flush();
  jobs_[num_jobs_++] = job;
}

void CopyBatch::Flush() {
  if (copy_streams_ == nullptr) {
    for (int64_t i = 0; i < num_jobs_; ++i) RunStridedCopy(plan_, jobs_[i].from, jobs_[i].to);
  } else if (num_jobs_ > 0) {
    ForEachRun(plan_, [&](int64_t from_bytes, int64_t to_bytes) {
      CopyJob runs[kMaxCopyJobs];
      for (int64_t i = 0; i < num_jobs_; ++i) {
        runs[i] = {jobs_[i].from + from_bytes, jobs_[i].to + to_bytes};
      }
      CopyRuns(copy_streams_, runs, num_jobs_, plan_.run_bytes);
    });
    FenceStores();
  }
  num_jobs_ = 0;
}

void ZeroStridedDestination(const StridedCopy& plan, std::byte* to) {
  const size_t run_bytes = static_cast<size_t>(plan.run_bytes);
  ForEachRun(plan, [&](int64_t, int64_t to_bytes) { std::memset(to + to_bytes, 0, run_bytes); });
}

}  // namespace blockcompact
