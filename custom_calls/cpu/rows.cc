#include "blockcompact/rows.h"

#include <algorithm>
#include <array>
#include <vector>

#include "blockcompact/head_kernels.h"
#include "blockcompact/strided_copy.h"

namespace blockcompact {
namespace {

// Less than this is not worth another thread.
constexpr int64_t kMinTaskBytes = int64_t{1} << 18;

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
             const RowFunction& run_row) {
  const int64_t rows_per_task =
      std::max<int64_t>(1, kMinTaskBytes / std::max<int64_t>(1, row_bytes));
  const int64_t num_tasks = (rows.num_rows + rows_per_task - 1) / rows_per_task;
  parallel_for(num_tasks, [&](int64_t task) {
    const int64_t begin = task * rows_per_task;
    const int64_t end = std::min(rows.num_rows, begin + rows_per_task);
    for (int64_t row = begin; row < end; ++row) run_row(row);
  });
}

HeadShape HeadShapeOf(const PlainView& view) {
  return {view.shape.block_tokens, view.shape.head_dim, view.strides.token_bytes};
}

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
  const HeadShape shape = HeadShapeOf(from);
  ForRows(rows, to.shape.packed_row_bytes(), parallel_for, [&](int64_t row) {
    if (rows.is_hole(row)) return;
    const int64_t layer = rows.layer_of(row);
    const int64_t from_block = rows.from_block[row];
    const int64_t to_block = rows.to_block == nullptr ? row : rows.to_block[row];
    for (int64_t head = 0; head < to.shape.num_heads; ++head) {
      kernels.pack_k(from.head(layer, from_block, 0, head), to.head(layer, to_block, 0, head),
                     shape);
      kernels.pack_v(from.head(layer, from_block, 1, head), to.head(layer, to_block, 1, head),
                     shape);
    }
  });
}

void UnpackRows(const PackedView& from, const PlainView& to, const Rows& rows,
                const ParallelFor& parallel_for) {
  const HeadKernels kernels =
      SelectHeadKernels(ChosenImpl(), from.layout, from.shape.element_bytes);
  const HeadShape shape = HeadShapeOf(to);
  ForRows(rows, from.shape.packed_row_bytes(), parallel_for, [&](int64_t row) {
    if (rows.is_hole(row)) return;
    const int64_t layer = rows.layer_of(row);
    const int64_t from_block = rows.from_block[row];
    const int64_t to_block = rows.to_block == nullptr ? row : rows.to_block[row];
    const int64_t num_tokens =
        rows.valid_tokens == nullptr ? from.shape.block_tokens : rows.valid_tokens[row];
    for (int64_t head = 0; head < from.shape.num_heads; ++head) {
      kernels.unpack_k(from.head(layer, from_block, 0, head), to.head(layer, to_block, 0, head),
                       shape, num_tokens);
      kernels.unpack_v(from.head(layer, from_block, 1, head), to.head(layer, to_block, 1, head),
                       shape, num_tokens);
    }
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
  ForRows(rows, shape.packed_row_bytes(), parallel_for, [&](int64_t row) {
    if (rows.is_hole(row)) {
      ZeroStridedDestination(copy, to.block(0, row));
    } else {
      RunStridedCopy(copy, from.block(rows.layer_of(row), rows.from_block[row]), to.block(0, row));
    }
  });
}

}  // namespace blockcompact
