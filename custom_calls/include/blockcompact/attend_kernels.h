// The arithmetic of attention on tiles of keys, and the implementations of it.
//
// A tile holds tokens in the order of layout `amx`, in words of 32 bits (a pair of 16-bit elements
// or one 32-bit element). K comes in tiles of kTileTokens, [words of a token][token]; V in tiles of
// kValueTokens, for each 16 dims [word of tokens][dim]. dims_padded is head_dim rounded up to 16;
// what is added is zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "blockcompact/attend.h"
#include "blockcompact/head_kernels.h"
#include "blockcompact/prefetch.h"

namespace blockcompact {

inline constexpr int64_t kTileTokens = 16;
inline constexpr int64_t kGroupTiles = 4;
inline constexpr int64_t kGroupTokens = kGroupTiles * kTileTokens;
inline constexpr int64_t kValueTokens = 32;  // of a V tile
inline constexpr int64_t kGroupVTiles = kGroupTokens / kValueTokens;
inline constexpr int64_t kStepTokens =
    128;  // scored, weighed and added while they are in the cache
inline constexpr int64_t kStepVTiles = kStepTokens / kValueTokens;
inline constexpr int64_t kChunkTokens = 512;  // steps of one softmax; chunks are merged
inline constexpr int64_t kChunkTiles = kChunkTokens / kTileTokens;
inline constexpr int64_t kChunkVTiles = kChunkTokens / kValueTokens;
inline constexpr int64_t kRowTokens = kStepTokens + 32;  // no power of two: rows share no cache set
inline constexpr int64_t kDimsOfWord = 16;               // dims in one line of a V tile

struct VTile {
  const std::byte* base = nullptr;
  int64_t dim_group_stride_bytes = 0;  // distance of 16 dims from the next 16
};

// That distance in a V tile of our own.
inline constexpr int64_t kVStrideElements = kValueTokens * kDimsOfWord;

// Lines that a job asks for, spread over its work.
struct AheadLines {
  PrefetchQueue* queue = nullptr;
  int64_t num_lines = 0;

  // With each of num_parts pieces of work.
  int64_t Of(int64_t num_parts) const { return (num_lines + num_parts - 1) / num_parts; }
  __attribute__((always_inline)) inline void Ask(int64_t count) const {
    if (count > 0) queue->Ask(count);
  }
};

// Rows of queries, scores and weights of one KV head. Weights are kRowTokens apart.
struct ScoreJob {
  const std::byte* queries;  // [num_rows, dims_padded]
  int64_t num_rows;
  int64_t dims_padded;
  const std::byte* k_tiles[kGroupTiles];
  float* scores;                    // of the group's first token
  int64_t row_tokens = kRowTokens;  // distance of two rows of scores
  AheadLines ahead;
};

struct ValueJob {
  const std::byte* weights;  // elements of the type, of the group's first token
  int64_t num_rows;
  int64_t dims_padded;
  VTile v_tiles[kStepVTiles];
  int64_t num_tiles;
  float* sums;                 // [num_rows, dims_padded], added to
  bool has_spare_rows = true;  // sums of kSpareRows rows more may be overwritten
  AheadLines ahead;
};

inline constexpr int64_t kLanes = 16;  // partial sums of a row's weights, which `sums` adds up

// One step of the softmax of rows that see the same keys: [begin, end) is seen, [write_begin,
// write_end) is written. Weights are exp(|scale| * (score - maximum)) of the largest score so far;
// where a step finds a larger one, what was summed before is scaled.
struct SoftmaxJob {
  float* scores;       // in: dot products; out, where wanted: weights, 0 where not seen
  int64_t row_tokens;  // distance of two rows of scores
  bool keeps_weights;  // whether scores are overwritten
  std::byte* weights;  // bf16: the same, rounded, rows kRowTokens apart; null: not wanted
  int64_t num_rows;
  int64_t begin, end;              // not empty
  int64_t write_begin, write_end;  // multiples of kGroupTokens around it
  float scale;                     // where it is negative, the smallest product is the maximum
  float* maximum;                  // [num_rows] of the products, negated for a negative scale
  float* lanes;                    // [num_rows, kLanes]
  float* sums;                     // [num_rows, num_sums] of the steps before
  int64_t num_sums;
  float* mass;  // [num_rows, num_mass] of the steps before
  int64_t num_mass;
  AheadLines ahead;
};

// Values of neighbouring blocks of some rows, each block reduced to one.
struct BlocksJob {
  const float* values;  // [num_rows] of [num_blocks, block_tokens], row_tokens apart
  int64_t block_tokens;
  int64_t num_blocks;
  float* results;  // [num_rows, num_blocks]
  int64_t num_rows = 1;
  int64_t row_tokens = 0;
};

// Results of the chunks of one row.
struct MergeJob {
  const float* maximum;  // [num_chunks], -inf where a chunk has no seen key
  const float* sum;      // [num_chunks]
  const float* sums;     // [num_chunks], each dims_padded, sums_stride apart
  int64_t sums_stride;
  int64_t num_chunks;
  int64_t dims_padded;
  float* out;     // [dims_padded]
  float* shares;  // [num_chunks]: factor of a chunk's weights in the whole softmax
};

// Bounds of the first tokens of a K tile, as integers in the order of the floats they stand for:
// float32 bits x as x ^ ((x >> 31) & 0x7FFFFFFF), bf16 as the float32 it widens to.
struct BoundsJob {
  const std::byte* k_tile;
  int64_t num_tokens;  // 1 ... kTileTokens
  int64_t dims_padded;
  int32_t* minimum;  // [dims_padded], in and out
  int32_t* maximum;  // [dims_padded], in and out
};

struct AttendKernels {
  // kTileTokens rows of K, kValueTokens of V. rows[t] null: zeros. The `head_dim` elements of a row
  // are contiguous. The V tile has its 16 dims kVStrideElements from the next 16.
  void (*pack_k)(const std::byte* const* rows, int64_t head_dim, std::byte* tile);
  void (*pack_v)(const std::byte* const* rows, int64_t head_dim, std::byte* tile);
  // K of layout `vec`: num_tokens neighbours from `column`, dims row_stride elements apart.
  void (*pack_k_vec)(const std::byte* column, int64_t num_tokens, int64_t row_stride,
                     int64_t head_dim, std::byte* tile);
  void (*score)(const ScoreJob& job);
  void (*softmax)(const SoftmaxJob& job);
  void (*sums)(const BlocksJob& job);
  void (*value)(const ValueJob& job);
  float (*merge)(const MergeJob& job);   // returns log(sum(exp))
  void (*maxima)(const BlocksJob& job);  // NaN where one is NaN
  void (*bounds)(const BoundsJob& job);
  // Around score and value jobs of at most num_rows rows on one thread; null: nothing to do. Their
  // queries, scores and weights are readable, scores writable, for kSpareRows rows more.
  void (*enter)(int64_t num_rows) = nullptr;
  void (*leave)() = nullptr;
};

inline constexpr int64_t kSpareRows = 16;

// The best kernels that an implementation has on this machine. `avx512` uses products of bf16 pairs
// and AMX tiles where the machine has them.
AttendKernels SelectAttendKernels(Impl impl, AttendType type, int64_t dims_padded);

struct NamedAttendKernels {
  const char* name;
  AttendKernels kernels;
};

// All that this machine can run, for tests.
std::vector<NamedAttendKernels> AvailableAttendKernels(AttendType type, int64_t dims_padded);

inline constexpr int64_t PaddedDims(int64_t head_dim) {
  return (head_dim + kDimsOfWord - 1) / kDimsOfWord * kDimsOfWord;
}

// Those that calls use: the forced ones, else the selected ones.
AttendKernels ChosenAttendKernels(AttendType type, int64_t dims_padded);

// Makes every call use these kernels, for tests; null returns to the choice above.
void ForceAttendKernels(const AttendKernels* kernels);

namespace scalar {
AttendKernels AttendKernelsOf(AttendType type);
}
#if defined(__x86_64__)
namespace avx2 {
bool HasFma();
AttendKernels AttendKernelsOf(AttendType type);
}  // namespace avx2
namespace avx512 {
bool HasPairProducts();
AttendKernels AttendKernelsOf(AttendType type, bool has_pair_products);
}  // namespace avx512
namespace amx {
bool IsAvailable(int64_t dims_padded);
AttendKernels WithTiles(AttendKernels kernels);  // bf16 scores and weighted sums on tiles
}  // namespace amx
#endif

}  // namespace blockcompact
