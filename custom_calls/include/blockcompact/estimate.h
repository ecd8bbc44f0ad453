// Blocks chosen by an estimate of what a query will attend to, from the moments of their keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "blockcompact/attend.h"
#include "blockcompact/block_scores.h"
#include "blockcompact/parallel.h"
#include "blockcompact/pool_calls.h"
#include "blockcompact/status.h"

namespace blockcompact {

// One sequence and its query. Its candidates are its first blocks, `moments.num_keys` of them.
struct EstimateSequence {
  KeyBlocks moments;  // of the pool of moments: a key of twice the dims stands for a candidate
  KeyBlocks exact;    // of the pool of keys: the first num_sinks blocks, then what follows the
                      // candidates; their log-sum-exps are taken from the keys themselves
  RowsAt<const std::byte> query;             // a row a query head, of the pools' type
  const int32_t* physical_blocks = nullptr;  // of the candidates
  int64_t num_chosen = 0;                    // at most as many as there are candidates
  int32_t* chosen = nullptr;                 // [num_chosen], written: logical blocks, ascending
  int32_t* table = nullptr;                  // [num_chosen], written: their physical blocks
};

// A block of n keys weighs n * exp(scale * q.mean + scale^2 * q^2.variance / 2): its moments are
// the mean in the first half of the dims, the variance in the second one.
struct EstimateCall {
  AttendType type = AttendType::kBf16;
  int64_t num_query_heads = 0;
  int64_t head_dim = 0;  // of the query
  int64_t block_tokens = 0;
  int64_t num_sinks = 0;  // first blocks, which are always chosen
  float scale = 1.0F;
};

// A status and the first logical block, candidate or not, that weighs what is not finite in any
// head, with its sequence; -1 where none does.
struct EstimateResult {
  Status status;
  int64_t sequence = -1;
  int64_t block = -1;
};

// Chooses the blocks of each sequence by the mean over query heads of their attention mass. Of
// equal masses the lower block is chosen. Nothing is written for any sequence where the status is
// not ok or a block is not finite; a faulty row counts the entries of all tables of one pool.
//
// The caller answers for 0 <= num_sinks <= num_chosen <= candidates, for exact tables of at least
// num_sinks blocks, full ones, and a key behind them, and for the range of physical_blocks.
EstimateResult PoolChooseByEstimate(const PoolRef& moments, const PoolRef& keys,
                                    const EstimateCall& call,
                                    std::vector<EstimateSequence> sequences,
                                    const ParallelFor& parallel_for);

}  // namespace blockcompact
