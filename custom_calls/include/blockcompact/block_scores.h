// Scores of blocks straight from their keys, as they lie: q . k, and bounds of the keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "blockcompact/attend.h"
#include "blockcompact/parallel.h"
#include "blockcompact/pool_calls.h"
#include "blockcompact/status.h"
#include "blockcompact/views.h"

namespace blockcompact {

// Mirrored by `_REDUCTIONS` in blockcompact_jax/kernels/block_scores.py.
enum class BlockReduction : int32_t { kTokens = 0, kMax = 1, kMean = 2, kSum = 3, kLogSumExp = 4 };

// The first num_keys tokens of the blocks that `block_table` lists, of one layer of one of the
// views. Entries past the last key are not looked at.
struct KeyBlocks {
  const PlainView* plain = nullptr;
  const PackedView* packed = nullptr;
  int64_t layer = 0;
  const int32_t* block_table = nullptr;
  int64_t num_entries = 0;
  int64_t num_keys = 0;
};

// Every query meets every key. Query head h uses KV head h / (query heads / KV heads).
struct ScoreCall {
  AttendType type = AttendType::kBf16;
  int64_t num_query_heads = 0;
  int64_t num_queries = 0;
  int64_t head_dim = 0;
  float scale = 1.0F;
  RowsAt<const std::byte> queries;
  BlockReduction reduction = BlockReduction::kMax;
  // [num_query_heads, num_queries, num_entries], with kTokens num_entries * block_tokens. -inf
  // where there is no key. A NaN among the scores of a block makes its score NaN.
  float* scores = nullptr;
  int64_t row_stride = 0;  // distance of two rows of scores in elements; 0: their columns
};

// One of several sequences that a call scores.
struct ScoreSequence {
  KeyBlocks keys;
  ScoreCall call;
};

// Element-wise minimum and maximum of the keys of each block, both NaN where one key is; 0 where
// there is no key. [num_kv_heads, num_entries, head_dim] of the keys' type.
struct SummaryCall {
  AttendType type = AttendType::kBf16;
  std::byte* min_keys = nullptr;
  std::byte* max_keys = nullptr;
};

// Nothing is written unless all is valid; the faulty row is a table entry. The bits do not depend
// on the threads, the layout, or the other queries and entries.
Status ScoreBlocks(const KeyBlocks& keys, const ScoreCall& call, const ParallelFor& parallel_for);
// All sequences at once, of one type; the faulty row counts the entries of all tables.
Status ScoreSequences(const std::vector<ScoreSequence>& sequences, const ParallelFor& parallel_for);
Status SummarizeBlocks(const KeyBlocks& keys, const SummaryCall& call,
                       const ParallelFor& parallel_for);

// The same for a registered pool; the views of `keys` are set here.
Status PoolScoreBlocks(const PoolRef& pool, KeyBlocks keys, const ScoreCall& call,
                       const ParallelFor& parallel_for);
Status PoolScoreSequences(const PoolRef& pool, std::vector<ScoreSequence> sequences,
                          const ParallelFor& parallel_for);
Status PoolSummarizeBlocks(const PoolRef& pool, KeyBlocks keys, const SummaryCall& call,
                           const ParallelFor& parallel_for);

}  // namespace blockcompact
