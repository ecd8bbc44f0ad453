#include <algorithm>
#include <cstring>
#include <limits>

#include "attend_tiles.h"
#include "blockcompact/attend_kernels.h"
#include "blockcompact/block_scores.h"
#include "key_blocks.h"
#include "scratch.h"

namespace blockcompact {
namespace {

int32_t OrderOf(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

// Bits of the bounds, of bf16 in the upper half.
struct Bounds {
  uint32_t minimum;
  uint32_t maximum;
};

Bounds BoundsOf(int32_t minimum, int32_t maximum) {
  constexpr int32_t kInfinity = 0x7F800000;
  constexpr uint32_t kNan = 0x7FC00000;
  const bool has_nan = maximum > kInfinity || minimum < OrderOf(~0x7FFFFFFF | kInfinity);
  if (has_nan) return {kNan, kNan};
  return {static_cast<uint32_t>(OrderOf(minimum)), static_cast<uint32_t>(OrderOf(maximum))};
}

void WriteKey(AttendType type, uint32_t bits, std::byte* to) {
  if (type == AttendType::kF32) {
    std::memcpy(to, &bits, sizeof(bits));
  } else {
    const auto half = static_cast<uint16_t>(bits >> 16);
    std::memcpy(to, &half, sizeof(half));
  }
}

void SummarizeEntry(const KeyBlocks& keys, const SummaryCall& call, const AttendKernels& kernels,
                    int64_t kv_head, int64_t entry) {
  const BlockShape& shape = ShapeOf(keys);
  const int64_t dims_padded = PaddedDims(shape.head_dim);
  const int64_t tile_bytes = kTileTokens * dims_padded * shape.element_bytes;
  thread_local Scratch scratch;
  scratch.Reset(2 * tile_bytes + 8 * dims_padded, 4);
  auto* tile = scratch.Take<std::byte>(tile_bytes);
  const KeySequence sequence = SequenceOf(keys);
  const TileReader reader(sequence, kernels, kv_head, scratch.Take<std::byte>(tile_bytes));
  auto* minimum = scratch.Take<int32_t>(dims_padded);
  auto* maximum = scratch.Take<int32_t>(dims_padded);
  std::fill_n(minimum, dims_padded, std::numeric_limits<int32_t>::max());
  std::fill_n(maximum, dims_padded, std::numeric_limits<int32_t>::min());
  const int64_t end = std::min(keys.num_keys, (entry + 1) * shape.block_tokens);
  for (int64_t key = entry * shape.block_tokens; key < end; key += kTileTokens) {
    kernels.bounds(
        {reader.K(key, tile), std::min(kTileTokens, end - key), dims_padded, minimum, maximum});
  }
  const int64_t first = (kv_head * keys.num_entries + entry) * shape.head_dim;
  for (int64_t d = 0; d < shape.head_dim; ++d) {
    const Bounds bounds = BoundsOf(minimum[d], maximum[d]);
    WriteKey(call.type, bounds.minimum, call.min_keys + (first + d) * shape.element_bytes);
    WriteKey(call.type, bounds.maximum, call.max_keys + (first + d) * shape.element_bytes);
  }
}

}  // namespace

Status SummarizeBlocks(const KeyBlocks& keys, const SummaryCall& call,
                       const ParallelFor& parallel_for) {
  const Status status = CheckKeys(keys, call.type);
  if (!status.ok()) return status;
  const BlockShape& shape = ShapeOf(keys);
  const int64_t entry_bytes = shape.token_bytes();
  const int64_t num_used = NumUsedEntries(keys);
  const auto num_unused_bytes = static_cast<size_t>((keys.num_entries - num_used) * entry_bytes);
  for (int64_t head = 0; head < shape.num_heads; ++head) {
    const int64_t unused = (head * keys.num_entries + num_used) * entry_bytes;
    std::memset(call.min_keys + unused, 0, num_unused_bytes);
    std::memset(call.max_keys + unused, 0, num_unused_bytes);
  }
  const AttendKernels kernels = ChosenAttendKernels(call.type, PaddedDims(shape.head_dim));
  const int64_t entries_per_task = EntriesOfTask(keys);
  const int64_t num_ranges = (num_used + entries_per_task - 1) / entries_per_task;
  parallel_for(num_ranges * shape.num_heads, [&](int64_t task) {
    const int64_t first_entry = task / shape.num_heads * entries_per_task;
    const int64_t last_entry = std::min(num_used, first_entry + entries_per_task);
    for (int64_t entry = first_entry; entry < last_entry; ++entry) {
      SummarizeEntry(keys, call, kernels, task % shape.num_heads, entry);
    }
  });
  return {};
}

Status PoolSummarizeBlocks(const PoolRef& ref, KeyBlocks keys, const SummaryCall& call,
                           const ParallelFor& parallel_for) {
  return OnPool(ref, [&](const Pool& pool) {
    const Status status = CheckOnPool(pool, call.type, &keys);
    return status.ok() ? SummarizeBlocks(keys, call, parallel_for) : status;
  });
}

}  // namespace blockcompact
