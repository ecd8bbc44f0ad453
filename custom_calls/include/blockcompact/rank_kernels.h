// Passes over the keys of one row, and the implementations of them.
//
// A key is a score's bits, made to order as unsigned: a larger score has a larger key, and both
// zeros have the same one.
#pragma once

#include <cstdint>

#include "blockcompact/head_kernels.h"

namespace blockcompact {

// Results may be written up to this many elements past what is counted.
inline constexpr int64_t kRankSpare = 96;

// The key of a score's bits; those of finite scores lie strictly between 0 and UINT32_MAX.
inline uint32_t KeyOf(uint32_t bits) {
  constexpr uint32_t kSign = 0x80000000U;
  bits = bits == kSign ? 0 : bits;
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | kSign);
}

struct KeyRange {
  int64_t first_non_finite;  // -1: none
  uint32_t smallest, largest;
};

// Which keys are chosen: all above `threshold`, and the first `num_tied` equal to it.
struct KeyCut {
  uint32_t threshold;
  int64_t num_tied;
};

struct RankKernels {
  // num_blocks > 0.
  KeyRange (*make_keys)(const float* scores, int64_t num_blocks, uint32_t* keys);
  int64_t (*count_at_least)(const uint32_t* keys, int64_t num_keys, uint32_t threshold);
  // How many scores have a key of `threshold` or more; -1 where any score is NaN or infinite.
  int64_t (*count_scores)(const float* scores, int64_t num_scores, uint32_t threshold);
  // Lowers *worst_in to the smallest key of the marked scores and raises *best_out to the largest
  // of the others; bit i of `is_in` marks score i. False where any score is NaN or infinite.
  bool (*split_scores)(const float* scores, int64_t num_scores, const uint64_t* is_in,
                       uint32_t* worst_in, uint32_t* best_out);
  // Copies the keys within [low, high] in their order; returns how many.
  int64_t (*keep_within)(const uint32_t* keys, int64_t num_keys, uint32_t low, uint32_t high,
                         uint32_t* kept);
  // Lists the chosen blocks ascending, without the excluded ones, and their keys. `is_excluded` and
  // `chosen_keys` may be null. Block i has number first_block + i.
  int64_t (*list_chosen)(const uint32_t* keys, int64_t num_keys, const KeyCut& cut,
                         const uint8_t* is_excluded, int32_t first_block, int32_t* blocks,
                         uint32_t* chosen_keys);
  // rank[i]: chosen keys before key i by (-key, place).
  void (*rank_few)(const uint32_t* keys, int64_t num_keys, int32_t* rank);
  // Lists where bytes are not zero, ascending; stops once `capacity` or more are listed.
  int64_t (*list_set)(const uint8_t* bytes, int64_t num_bytes, int64_t capacity, int32_t* places);
};

RankKernels SelectRankKernels(Impl impl);

namespace scalar {
RankKernels RankKernelsOf();
}
#if defined(__x86_64__)
namespace avx2 {
RankKernels RankKernelsOf();
}
namespace avx512 {
RankKernels RankKernelsOf();
}
#endif

}  // namespace blockcompact
