// Attention of the newest queries over blocks of registered pools, through block tables.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blockcompact/parallel.h"
#include "blockcompact/pool_calls.h"
#include "blockcompact/status.h"

namespace blockcompact {

enum class AttendType : int32_t { kBf16 = 2, kF32 = 4 };  // values: bytes of an element

// [num_query_heads, num_queries, contiguous last axis] anywhere in memory.
template <typename Byte>
struct RowsAt {
  Byte* base = nullptr;  // null: not wanted
  int64_t head_stride_bytes = 0;
  int64_t query_stride_bytes = 0;

  Byte* row(int64_t head, int64_t query) const {
    return base + head * head_stride_bytes + query * query_stride_bytes;
  }
};

// Keys and values of one pool: the first num_keys tokens of the blocks that `block_table` lists.
// Entries past the last key are not looked at.
struct AttendSegment {
  PoolRef pool;
  int64_t layer = 0;
  const int32_t* block_table = nullptr;
  int64_t num_entries = 0;
  int64_t num_keys = 0;
};

inline constexpr int64_t kMaxAttendSegments = 2;

// The keys of all segments, one after the other, are the sequence; its last num_queries keys are
// the queries' own. Query i sees the keys up to its own, of these the last `window_tokens`.
struct AttendCall {
  AttendType type = AttendType::kBf16;
  int64_t num_query_heads = 0;
  int64_t num_queries = 0;
  int64_t head_dim = 0;
  float scale = 1.0F;
  int64_t window_tokens = 0;  // 0: no window
  AttendSegment segments[kMaxAttendSegments];
  int64_t num_segments = 0;
  RowsAt<const std::byte> queries;  // head_dim elements a row
  RowsAt<std::byte> out;            // head_dim elements a row
  RowsAt<std::byte> block_mass;     // max_blocks floats a row; column: used entry over all segments
  int64_t max_blocks = 0;
  float* log_sum_exp = nullptr;  // [num_query_heads, num_queries] or null
};

// The bits of a row of results depend on its own query and on the keys and values it sees alone:
// not on the threads, the other queries, the layout, or how the keys are cut into blocks and
// segments. Nothing is written unless all is valid. A faulty entry is counted over all tables.
Status PoolAttend(const AttendCall& call, const ParallelFor& parallel_for);

}  // namespace blockcompact
