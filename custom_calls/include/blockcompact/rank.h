// The best blocks of each layer row by (-score, block), without sorting the row; and whether given
// blocks are the best.
#pragma once

#include <cstdint>

#include "blockcompact/parallel.h"
#include "blockcompact/rows.h"

namespace blockcompact {

enum class RankOrder : int32_t { kScore = 0, kBlock = 1 };

// Dense rows. A larger score ranks first, of equal scores the lower block; -0.0 equals 0.0. The
// first num_sinks blocks rank before all others.
struct RankCall {
  const float* scores = nullptr;            // [num_rows, num_blocks]
  const int32_t* num_candidates = nullptr;  // [num_rows]: the first blocks, alone looked at
  const int32_t* count = nullptr;           // [num_rows]: best blocks to take
  const uint8_t* is_excluded = nullptr;     // [num_rows, num_blocks] or null: taken, not listed
  int64_t num_rows = 0;
  int64_t num_blocks = 0;
  int64_t num_sinks = 0;
  int64_t capacity = 0;
  RankOrder order = RankOrder::kScore;
  int32_t* blocks = nullptr;            // [num_rows, capacity], kHole padded
  int32_t* first_non_finite = nullptr;  // [num_rows]: a candidate, or kHole
};

// Counts are cut to what there is: 0 ... min(candidates, capacity). A row with a candidate that is
// NaN or infinite lists nothing.
void RankRows(const RankCall& call, const ParallelFor& parallel_for);

// Dense batches of rows, ordered as in RankCall.
struct BestCall {
  const float* scores = nullptr;            // [batch, row, num_blocks]
  const int32_t* num_candidates = nullptr;  // [batch, row]
  const int32_t* listed = nullptr;          // [batch, row, num_places]
  const int32_t* num_listed = nullptr;      // [batch, row]: places that count
  int64_t num_batches = 0;
  int64_t num_rows = 0;
  int64_t num_blocks = 0;
  int64_t num_places = 0;
  int64_t num_sinks = 0;
  uint8_t* are_best = nullptr;  // [batch]
};

// Whether the listed blocks of every row are its best candidates, in any order. Not where a
// candidate is NaN or infinite, a block is listed twice, or what is listed is no candidate.
void CheckBest(const BestCall& call, const ParallelFor& parallel_for);

}  // namespace blockcompact
