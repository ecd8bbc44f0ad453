#include "blockcompact/rows.h"

#include <algorithm>
#include <array>
#include <vector>

#include "blockcompact/head_kernels.h"
#include "blockcompact/streaming.h"
#include "blockcompact/strided_copy.h"

namespace blockcompact {
namespace {

// Less than this is not worth another thread, and lets prefetching start anew too often.
constexpr int64_t kMinTaskBytes = int64_t{1} << 20;

bool InRange(int64_t value, int64_t limit) { return value >= 0 && value < limit; }

StatusCode CheckRow(const Rows& rows, int64_t row, const RowLimits& limits) {
  const bool has_to_block = rows.to_block != nullptr;
  const int32_t from_block = rows.from_block[row];
  if (has_to_block && (from_block == kHole) != (rows.to_block[row] == kHole)) {
    return StatusCode::kPartialHole;
  }
  if (from_block == kHole) return StatusCode::kOk;
  if (!InRange(rows.layer_of(row), limits.num_layers)) return StatusCode::kLayerOutOfRange;
  if (!InRange(from_block, limits.num_from_blocks)) return StatusCode::kFromBlockOutOfRange;
  if (has_to_block && !InRange(rows.to_block[row], limits.num_to_blocks)) {
    return StatusCode::kToBlockOutOfRange;
  }
  if (rows.valid_tokens != nullptr && !InRange(rows.valid_tokens[row], limits.block_tokens + 1)) {
    return StatusCode::kValidTokensOutOfRange;
  }
  return StatusCode::kOk;
}

// First row whose (layer, to_block) an earlier row has, or -1.
int64_t FirstDuplicate(const Rows& rows, const RowLimits& limits) {
  std::vector<bool> is_taken(static_cast<size_t>(limits.num_layers * limits.num_to_blocks));
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    if (rows.is_hole(row)) continue;
    const size_t cell =
        static_cast<size_t>(rows.layer_of(row) * limits.num_to_blocks + rows.to_block[row]);
    if (is_taken[cell]) return row;
    is_taken[cell] = true;
  }
  return -1;
}

template <typename RowFunction>
void ForRows(const Rows& rows, int64_t row_bytes, const ParallelFor& parallel_for,
             const RowFunction& run_rows) {
  const int64_t rows_per_task =
      std::max<int64_t>(1, kMinTaskBytes / std::max<int64_t>(1, row_bytes));
  const int64_t num_tasks = (rows.num_rows + rows_per_task - 1) / rows_per_task;
  parallel_for(num_tasks, [&](int64_t task) {
    const int64_t begin = task * rows_per_task;
    run_rows(begin, std::min(rows.num_rows, begin + rows_per_task));
  });
}

int64_t NumActiveRows(const Rows& rows) {
  return std::count_if(rows.from_block, rows.from_block + rows.num_rows,
                       [](int32_t block) { return block != kHole; });
}

HeadShape HeadShapeOf(const PlainView& view, const Rows& rows) {
  const int64_t num_bytes = NumActiveRows(rows) * view.shape.packed_row_bytes();
  return {view.shape.block_tokens, view.shape.head_dim, view.strides.token_bytes,
          PaysToStream(num_bytes)};
}

// The heads of a range of rows, kMaxHeadJobs at a time: first their K, then their V.
template <typename From, typename To>
class HeadBatch {
 public:
  HeadBatch(const From& from, const To& to, const Rows& rows, const HeadShape& shape,
            HeadKernel k_kernel, HeadKernel v_kernel)
      : from_(from), to_(to), rows_(rows), shape_(shape), kernels_{k_kernel, v_kernel} {}

  void Run(int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (rows_.is_hole(row)) continue;
      for (int64_t head = 0; head < from_.shape.num_heads; ++head) Add({row, head});
    }
    // Prefetching looks one batch ahead, so a batch runs when the next one is known.
    while (num_ready_ > 0) RunOne();
  }

 private:
  struct Head {
    int64_t row;
    int64_t head;
  };

  void Add(Head head) {
    if (num_ready_ == 2 * kMaxHeadJobs) RunOne();
    ready_[num_ready_++] = head;
  }

  const void* FromHead(const Head& head, int64_t kv) const {
    return from_.head(rows_.layer_of(head.row), rows_.from_block[head.row], kv, head.head);
  }

  HeadJob JobOf(int64_t i, int64_t kv) const {
    const auto [row, head] = ready_[i];
    const int64_t to_block = rows_.to_block == nullptr ? row : rows_.to_block[row];
    const int64_t num_tokens =
        rows_.valid_tokens == nullptr ? shape_.block_tokens : rows_.valid_tokens[row];
    const int64_t next = i + kMaxHeadJobs;
    return {FromHead(ready_[i], kv), to_.head(rows_.layer_of(row), to_block, kv, head), num_tokens,
            next < num_ready_ ? FromHead(ready_[next], kv) : nullptr};
  }

  void RunOne() {
    const int64_t num_jobs = std::min(num_ready_, kMaxHeadJobs);
    for (int64_t kv = 0; kv < 2; ++kv) {
      HeadJob jobs[kMaxHeadJobs];
      for (int64_t i = 0; i < num_jobs; ++i) jobs[i] = JobOf(i, kv);
      kernels_[kv](jobs, num_jobs, shape_);
    }
    std::copy(ready_ + num_jobs, ready_ + num_ready_, ready_);
    num_ready_ -= num_jobs;
  }

  const From& from_;
  const To& to_;
  const Rows& rows_;
  const HeadShape& shape_;
  HeadKernel kernels_[2];
  Head ready_[2 * kMaxHeadJobs];
  int64_t num_ready_ = 0;
};

}  // namespace

Status CheckRows(const Rows& rows, const RowLimits& limits) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const StatusCode code = CheckRow(rows, row, limits);
    if (code != StatusCode::kOk) return {code, row};
  }
  if (rows.to_block == nullptr) return {};
  const int64_t duplicate = FirstDuplicate(rows, limits);
  if (duplicate >= 0) return {StatusCode::kDuplicateDestination, duplicate};
  return {};
}

void PackRows(const PlainView& from, const PackedView& to, const Rows& rows,
              const ParallelFor& parallel_for) {
  const HeadKernels kernels = SelectHeadKernels(ChosenImpl(), to.layout, to.shape.element_bytes);
  const HeadShape shape = HeadShapeOf(from, rows);
  ForRows(rows, to.shape.packed_row_bytes(), parallel_for, [&](int64_t begin, int64_t end) {
    HeadBatch(from, to, rows, shape, kernels.pack_k, kernels.pack_v).Run(begin, end);
    if (shape.is_streaming) FenceStores();
  });
}

void UnpackRows(const PackedView& from, const PlainView& to, const Rows& rows,
                const ParallelFor& parallel_for) {
  const HeadKernels kernels =
      SelectHeadKernels(ChosenImpl(), from.layout, from.shape.element_bytes);
  const HeadShape shape = HeadShapeOf(to, rows);
  ForRows(rows, from.shape.packed_row_bytes(), parallel_for, [&](int64_t begin, int64_t end) {
    HeadBatch(from, to, rows, shape, kernels.unpack_k, kernels.unpack_v).Run(begin, end);
    if (shape.is_streaming) FenceStores();
  });
}

void GatherRows(const PlainView& from, const PlainView& to, const Rows& rows,
                const ParallelFor& parallel_for) {
  const BlockShape& shape = from.shape;
  const StridedCopy copy = PlanStridedCopy(
      {CopyDim{2, from.strides.kv_bytes, to.strides.kv_bytes},
       CopyDim{shape.num_heads, from.strides.head_bytes, to.strides.head_bytes},
       CopyDim{shape.block_tokens, from.strides.token_bytes, to.strides.token_bytes}},
      shape.token_bytes());
  const CopyStreams copy_streams = CopyStreamsFor(NumActiveRows(rows) * shape.packed_row_bytes());
  ForRows(rows, shape.packed_row_bytes(), parallel_for, [&](int64_t begin, int64_t end) {
    CopyBatch batch(copy, copy_streams);
    for (int64_t row = begin; row < end; ++row) {
      if (rows.is_hole(row)) {
        ZeroStridedDestination(copy, to.block(0, row));
      } else {
        batch.Add({from.block(rows.layer_of(row), rows.from_block[row]), to.block(0, row)});
      }
    }
    batch.Flush();
  });
}

}  // namespace blockcompact
