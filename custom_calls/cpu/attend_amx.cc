// Scores and weighted sums of bf16 on AMX tiles: K and V tiles are operands as they lie.
#include <algorithm>
#include <cstring>

#include "blockcompact/attend_kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TARGET_AMX __attribute__((target("avx512f,amx-tile,amx-bf16")))

namespace blockcompact::amx {
namespace {

constexpr int64_t kMaxRows = 16;
constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kMaxCopiedDims = 512;

// Tile registers: 0-3 sums, 4 and 5 queries or weights, 6 and 7 keys or values.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {};
};

// Rows of the sums and of the left operands: those of a job in equal passes.
thread_local int64_t tile_rows = 0;

// The intrinsics do not tell the compiler that they read memory.
inline void Publish(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

TARGET_AMX void Enter(int64_t num_rows) {
  const int64_t num_passes = (num_rows + kMaxRows - 1) / kMaxRows;
  tile_rows = (num_rows + num_passes - 1) / num_passes;
  TileConfig config;
  const auto rows = static_cast<uint8_t>(tile_rows);
  for (int tile : {0, 1, 2, 3, 4, 5}) config.num_rows[tile] = rows;
  for (int tile : {6, 7}) config.num_rows[tile] = 16;
  Publish(&config);
  _tile_loadconfig(&config);
}

TARGET_AMX void Leave() { _tile_release(); }

// Up to 16 rows against the tiles of a group.
TARGET_AMX void ScorePass(const ScoreJob& job, int64_t first_row, int64_t num_ahead) {
  const int64_t row_bytes = job.dims_padded * 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t byte = 0; byte < row_bytes; byte += kLine) {
    job.ahead.Ask(num_ahead);
    _tile_loadd(4, job.queries + first_row * row_bytes + byte, row_bytes);
    _tile_loadd(6, job.k_tiles[0] + 16 * byte, kLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, job.k_tiles[1] + 16 * byte, kLine);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, job.k_tiles[2] + 16 * byte, kLine);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, job.k_tiles[3] + 16 * byte, kLine);
    _tile_dpbf16ps(3, 4, 7);
  }
  float* scores = job.scores + first_row * job.row_tokens;
  const int64_t stride_bytes = job.row_tokens * 4;
  _tile_stored(0, scores, stride_bytes);
  _tile_stored(1, scores + kTileTokens, stride_bytes);
  _tile_stored(2, scores + 2 * kTileTokens, stride_bytes);
  _tile_stored(3, scores + 3 * kTileTokens, stride_bytes);
}

// Two passes against two tiles, which are read once.
TARGET_AMX void ScoreTwoPasses(const ScoreJob& job, int64_t first_row, int64_t first_tile,
                               int64_t num_ahead) {
  const int64_t row_bytes = job.dims_padded * 2;
  const std::byte* queries = job.queries + first_row * row_bytes;
  const std::byte* more_queries = queries + tile_rows * row_bytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t byte = 0; byte < row_bytes; byte += kLine) {
    job.ahead.Ask(num_ahead);
    _tile_loadd(4, queries + byte, row_bytes);
    _tile_loadd(6, job.k_tiles[first_tile] + 16 * byte, kLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, job.k_tiles[first_tile + 1] + 16 * byte, kLine);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, more_queries + byte, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  float* scores = job.scores + first_row * job.row_tokens + first_tile * kTileTokens;
  float* more_scores = scores + tile_rows * job.row_tokens;
  const int64_t stride_bytes = job.row_tokens * 4;
  _tile_stored(0, scores, stride_bytes);
  _tile_stored(1, scores + kTileTokens, stride_bytes);
  _tile_stored(2, more_scores, stride_bytes);
  _tile_stored(3, more_scores + kTileTokens, stride_bytes);
}

// Three passes against one tile.
TARGET_AMX void ScoreThreePasses(const ScoreJob& job, int64_t first_row, int64_t tile,
                                 int64_t num_ahead) {
  const int64_t row_bytes = job.dims_padded * 2;
  const int64_t pass_bytes = tile_rows * row_bytes;
  const std::byte* queries = job.queries + first_row * row_bytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (int64_t byte = 0; byte < row_bytes; byte += kLine) {
    job.ahead.Ask(num_ahead);
    _tile_loadd(6, job.k_tiles[tile] + 16 * byte, kLine);
    _tile_loadd(3, queries + byte, row_bytes);
    _tile_dpbf16ps(0, 3, 6);
    _tile_loadd(4, queries + pass_bytes + byte, row_bytes);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, queries + 2 * pass_bytes + byte, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
  }
  float* scores = job.scores + first_row * job.row_tokens + tile * kTileTokens;
  const int64_t stride_bytes = job.row_tokens * 4;
  _tile_stored(0, scores, stride_bytes);
  _tile_stored(1, scores + tile_rows * job.row_tokens, stride_bytes);
  _tile_stored(2, scores + 2 * tile_rows * job.row_tokens, stride_bytes);
}

// Passes that read the keys, or the values, once.
int64_t NumPassesAtOnce(int64_t num_rows) {
  return std::min<int64_t>(3, (num_rows + tile_rows - 1) / tile_rows);
}

TARGET_AMX void Score(const ScoreJob& job) {
  Publish(job.queries);
  const int64_t num_parts = job.dims_padded * 2 / kLine;
  for (int64_t first = 0; first < job.num_rows;) {
    const int64_t num_passes = NumPassesAtOnce(job.num_rows - first);
    const auto num_ahead = [&](int64_t num_calls) {
      return first == 0 ? job.ahead.Of(num_calls * num_parts) : 0;
    };
    if (num_passes == 1) {
      ScorePass(job, first, num_ahead(1));
    } else if (num_passes == 2) {
      ScoreTwoPasses(job, first, 0, num_ahead(2));
      ScoreTwoPasses(job, first, 2, num_ahead(2));
    } else {
      for (int64_t tile = 0; tile < kGroupTiles; ++tile) {
        ScoreThreePasses(job, first, tile, num_ahead(kGroupTiles));
      }
    }
    first += num_passes * tile_rows;
  }
}

// Adds to kGroups x 16 dims of up to 16 rows.
template <int kGroups>
TARGET_AMX void AddGroups(const ValueJob& job, const std::byte* weights, int64_t first_group,
                          float* sums, int64_t num_ahead) {
  const int64_t row_bytes = job.dims_padded * 4;
  Publish(sums);
  _tile_loadd(0, sums, row_bytes);
  if constexpr (kGroups > 1) _tile_loadd(1, sums + kDimsOfWord, row_bytes);
  if constexpr (kGroups > 2) _tile_loadd(2, sums + 2 * kDimsOfWord, row_bytes);
  if constexpr (kGroups > 3) _tile_loadd(3, sums + 3 * kDimsOfWord, row_bytes);
  for (int64_t tile = 0; tile < job.num_tiles; ++tile) {
    const int64_t stride = job.v_tiles[tile].dim_group_stride_bytes;
    const std::byte* v = job.v_tiles[tile].base + first_group * stride;
    job.ahead.Ask(num_ahead);
    _tile_loadd(4, weights + tile * kValueTokens * 2, kRowTokens * 2);
    _tile_loadd(6, v, kLine);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kGroups > 1) {
      _tile_loadd(7, v + stride, kLine);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kGroups > 2) {
      _tile_loadd(6, v + 2 * stride, kLine);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kGroups > 3) {
      _tile_loadd(7, v + 3 * stride, kLine);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, row_bytes);
  if constexpr (kGroups > 1) _tile_stored(1, sums + kDimsOfWord, row_bytes);
  if constexpr (kGroups > 2) _tile_stored(2, sums + 2 * kDimsOfWord, row_bytes);
  if constexpr (kGroups > 3) _tile_stored(3, sums + 3 * kDimsOfWord, row_bytes);
}

// Adds to 2 x 16 dims of two full passes, which read the values once.
TARGET_AMX void AddTwoPasses(const ValueJob& job, const std::byte* weights, int64_t first_group,
                             float* sums, int64_t num_ahead) {
  const int64_t row_bytes = job.dims_padded * 4;
  const std::byte* more_weights = weights + tile_rows * kRowTokens * 2;
  float* more_sums = sums + tile_rows * job.dims_padded;
  Publish(sums);
  _tile_loadd(0, sums, row_bytes);
  _tile_loadd(1, sums + kDimsOfWord, row_bytes);
  _tile_loadd(2, more_sums, row_bytes);
  _tile_loadd(3, more_sums + kDimsOfWord, row_bytes);
  for (int64_t tile = 0; tile < job.num_tiles; ++tile) {
    const int64_t stride = job.v_tiles[tile].dim_group_stride_bytes;
    const std::byte* v = job.v_tiles[tile].base + first_group * stride;
    job.ahead.Ask(num_ahead);
    _tile_loadd(4, weights + tile * kValueTokens * 2, kRowTokens * 2);
    _tile_loadd(6, v, kLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, v + stride, kLine);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, more_weights + tile * kValueTokens * 2, kRowTokens * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, row_bytes);
  _tile_stored(1, sums + kDimsOfWord, row_bytes);
  _tile_stored(2, more_sums, row_bytes);
  _tile_stored(3, more_sums + kDimsOfWord, row_bytes);
}

// Adds to 16 dims of three full passes.
TARGET_AMX void AddThreePasses(const ValueJob& job, const std::byte* weights, int64_t group,
                               float* sums, int64_t num_ahead) {
  const int64_t row_bytes = job.dims_padded * 4;
  const int64_t pass_bytes = tile_rows * kRowTokens * 2;
  const int64_t pass_sums = tile_rows * job.dims_padded;
  Publish(sums);
  _tile_loadd(0, sums, row_bytes);
  _tile_loadd(1, sums + pass_sums, row_bytes);
  _tile_loadd(2, sums + 2 * pass_sums, row_bytes);
  for (int64_t tile = 0; tile < job.num_tiles; ++tile) {
    const std::byte* tile_weights = weights + tile * kValueTokens * 2;
    job.ahead.Ask(num_ahead);
    _tile_loadd(6, job.v_tiles[tile].base + group * job.v_tiles[tile].dim_group_stride_bytes,
                kLine);
    _tile_loadd(3, tile_weights, kRowTokens * 2);
    _tile_dpbf16ps(0, 3, 6);
    _tile_loadd(4, tile_weights + pass_bytes, kRowTokens * 2);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, tile_weights + 2 * pass_bytes, kRowTokens * 2);
    _tile_dpbf16ps(2, 5, 6);
  }
  _tile_stored(0, sums, row_bytes);
  _tile_stored(1, sums + pass_sums, row_bytes);
  _tile_stored(2, sums + 2 * pass_sums, row_bytes);
}

// Adds to all dims of one, two or three passes; asks for `num_lines` in all.
void AddPasses(const ValueJob& job, int64_t num_passes, const std::byte* weights, float* sums,
               int64_t num_lines) {
  const int64_t num_groups = job.dims_padded / kDimsOfWord;
  const AheadLines ahead = {job.ahead.queue, num_lines};
  for (int64_t group = 0; group < num_groups;) {
    float* group_sums = sums + group * kDimsOfWord;
    if (num_passes == 3) {
      AddThreePasses(job, weights, group, group_sums, ahead.Of(num_groups * job.num_tiles));
      group += 1;
    } else if (num_passes == 2) {
      AddTwoPasses(job, weights, group, group_sums, ahead.Of(num_groups / 2 * job.num_tiles));
      group += 2;
    } else if (group + 4 <= num_groups) {
      AddGroups<4>(job, weights, group, group_sums, ahead.Of(num_groups / 4 * job.num_tiles));
      group += 4;
    } else {
      AddGroups<2>(job, weights, group, group_sums, ahead.Of(num_groups / 2 * job.num_tiles));
      group += 2;
    }
  }
}

void Value(const ValueJob& job) {
  for (int64_t first = 0; first < job.num_rows;) {
    const int64_t num_left = job.num_rows - first;
    const std::byte* weights = job.weights + first * kRowTokens * 2;
    float* sums = job.sums + first * job.dims_padded;
    const int64_t num_lines = first == 0 ? job.ahead.num_lines : 0;
    const int64_t num_passes =
        job.has_spare_rows ? NumPassesAtOnce(num_left) : std::min<int64_t>(3, num_left / tile_rows);
    first += std::max<int64_t>(1, num_passes) * tile_rows;
    if (num_passes > 0) {
      AddPasses(job, num_passes, weights, sums, num_lines);
      continue;
    }
    // The registers hold more rows than there are: work on a copy.
    alignas(64) float copy[kMaxRows * kMaxCopiedDims];
    const auto num_bytes = static_cast<size_t>(num_left * job.dims_padded) * sizeof(float);
    std::memset(copy, 0, static_cast<size_t>(kMaxRows * job.dims_padded) * sizeof(float));
    std::memcpy(copy, sums, num_bytes);
    AddPasses(job, 1, weights, copy, num_lines);
    std::memcpy(sums, copy, num_bytes);
  }
}

// The kernel lets a process use tile registers only once it has asked.
bool MayUseTiles() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool HasTiles() {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool has_bf16_tiles = (d & (1U << 22)) != 0 && (d & (1U << 24)) != 0;
  return has_bf16_tiles && MayUseTiles();
}

}  // namespace

bool IsAvailable(int64_t dims_padded) {
  static const bool has_tiles = HasTiles();
  return has_tiles && dims_padded % 32 == 0 && dims_padded <= kMaxCopiedDims;
}

AttendKernels WithTiles(AttendKernels kernels) {
  kernels.enter = Enter;
  kernels.leave = Leave;
  kernels.score = Score;
  kernels.value = Value;
  return kernels;
}

}  // namespace blockcompact::amx

#else

namespace blockcompact::amx {

bool IsAvailable(int64_t) { return false; }
AttendKernels WithTiles(AttendKernels kernels) { return kernels; }

}  // namespace blockcompact::amx
#endif
