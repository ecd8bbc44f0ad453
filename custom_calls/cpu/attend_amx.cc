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
constexpr int64_t kTilesAhead = 2;  // that values are asked for before they are met

// Tile registers: 0-3 sums, 4 queries or weights, 5 keys or values.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
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
  for (int tile : {0, 1, 2, 3, 4}) config.num_rows[tile] = rows;
  config.num_rows[5] = 16;
  Publish(&config);
  _tile_loadconfig(&config);
}

TARGET_AMX void Leave() { _tile_release(); }

// Always inlined: a call that only asks for memory would be dropped as one without effect.
__attribute__((always_inline)) inline void PrefetchLines(const std::byte* first, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    _mm_prefetch(reinterpret_cast<const char*>(first + i * kLine), _MM_HINT_T0);
  }
}

TARGET_AMX void Score(const ScoreJob& job) {
  Publish(job.queries);
  const int64_t row_bytes = job.dims_padded * 2;
  for (int64_t first = 0; first < job.num_rows; first += tile_rows) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t byte = 0; byte < row_bytes; byte += kLine) {
      if (first == 0) {
        for (const std::byte* next : job.next_k_tiles) PrefetchLines(next + 16 * byte, 16);
      }
      _tile_loadd(4, job.queries + first * row_bytes + byte, row_bytes);
      _tile_loadd(5, job.k_tiles[0] + 16 * byte, kLine);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, job.k_tiles[1] + 16 * byte, kLine);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, job.k_tiles[2] + 16 * byte, kLine);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, job.k_tiles[3] + 16 * byte, kLine);
      _tile_dpbf16ps(3, 4, 5);
    }
    float* scores = job.scores + first * kRowTokens;
    _tile_stored(0, scores, kRowTokens * 4);
    _tile_stored(1, scores + kTileTokens, kRowTokens * 4);
    _tile_stored(2, scores + 2 * kTileTokens, kRowTokens * 4);
    _tile_stored(3, scores + 3 * kTileTokens, kRowTokens * 4);
  }
}

// Asks for the lines of a tile that comes soon, of some groups of 16 dims.
__attribute__((always_inline)) inline void PrefetchTile(const ValueJob& job, int64_t tile,
                                                        int64_t first_group, int64_t num_groups) {
  if (tile >= job.num_tiles) return;
  const VTile& next = job.v_tiles[tile];
  for (int64_t group = first_group; group < first_group + num_groups; ++group) {
    PrefetchLines(next.base + group * next.dim_group_stride_bytes, 16);
  }
}

// Adds to kGroups x 16 dims of up to 16 rows.
template <int kGroups>
TARGET_AMX void AddGroups(const ValueJob& job, const std::byte* weights, int64_t first_group,
                          float* sums) {
  const int64_t row_bytes = job.dims_padded * 4;
  Publish(sums);
  _tile_loadd(0, sums, row_bytes);
  if constexpr (kGroups > 1) _tile_loadd(1, sums + kDimsOfWord, row_bytes);
  if constexpr (kGroups > 2) _tile_loadd(2, sums + 2 * kDimsOfWord, row_bytes);
  if constexpr (kGroups > 3) _tile_loadd(3, sums + 3 * kDimsOfWord, row_bytes);
  for (int64_t tile = 0; tile < job.num_tiles; ++tile) {
    const int64_t stride = job.v_tiles[tile].dim_group_stride_bytes;
    const std::byte* v = job.v_tiles[tile].base + first_group * stride;
    PrefetchTile(job, tile + kTilesAhead, first_group, kGroups);
    _tile_loadd(4, weights + tile * kValueTokens * 2, kRowTokens * 2);
    _tile_loadd(5, v, kLine);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kGroups > 1) {
      _tile_loadd(5, v + stride, kLine);
      _tile_dpbf16ps(1, 4, 5);
    }
    if constexpr (kGroups > 2) {
      _tile_loadd(5, v + 2 * stride, kLine);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (kGroups > 3) {
      _tile_loadd(5, v + 3 * stride, kLine);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums, row_bytes);
  if constexpr (kGroups > 1) _tile_stored(1, sums + kDimsOfWord, row_bytes);
  if constexpr (kGroups > 2) _tile_stored(2, sums + 2 * kDimsOfWord, row_bytes);
  if constexpr (kGroups > 3) _tile_stored(3, sums + 3 * kDimsOfWord, row_bytes);
}

// Adds to 2 x 16 dims of two full passes, which read the values once.
TARGET_AMX void AddTwoPasses(const ValueJob& job, const std::byte* weights, int64_t first_group,
                             float* sums) {
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
    PrefetchTile(job, tile + kTilesAhead, first_group, 2);
    _tile_loadd(4, weights + tile * kValueTokens * 2, kRowTokens * 2);
    _tile_loadd(5, v, kLine);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, v + stride, kLine);
    _tile_dpbf16ps(1, 4, 5);
    _tile_loadd(4, more_weights + tile * kValueTokens * 2, kRowTokens * 2);
    _tile_dpbf16ps(3, 4, 5);
    _tile_loadd(5, v, kLine);
    _tile_dpbf16ps(2, 4, 5);
  }
  _tile_stored(0, sums, row_bytes);
  _tile_stored(1, sums + kDimsOfWord, row_bytes);
  _tile_stored(2, more_sums, row_bytes);
  _tile_stored(3, more_sums + kDimsOfWord, row_bytes);
}

void AddRows(const ValueJob& job, const std::byte* weights, float* sums) {
  const int64_t num_groups = job.dims_padded / kDimsOfWord;
  int64_t group = 0;
  for (; group + 4 <= num_groups; group += 4) {
    AddGroups<4>(job, weights, group, sums + group * kDimsOfWord);
  }
  for (; group < num_groups; group += 2) {
    AddGroups<2>(job, weights, group, sums + group * kDimsOfWord);
  }
}

void Value(const ValueJob& job) {
  for (int64_t first = 0; first < job.num_rows;) {
    const int64_t num_left = job.num_rows - first;
    const std::byte* weights = job.weights + first * kRowTokens * 2;
    float* sums = job.sums + first * job.dims_padded;
    const bool is_second_whole = num_left >= 2 * tile_rows || job.has_spare_rows;
    if (num_left > tile_rows && is_second_whole) {
      for (int64_t group = 0; group < job.dims_padded / kDimsOfWord; group += 2) {
        AddTwoPasses(job, weights, group, sums + group * kDimsOfWord);
      }
      first += 2 * tile_rows;
      continue;
    }
    first += tile_rows;
    if (num_left >= tile_rows || job.has_spare_rows) {
      AddRows(job, weights, sums);
      continue;
    }
    // The registers hold more rows than there are: work on a copy.
    alignas(64) float copy[kMaxRows * kMaxCopiedDims];
    const auto num_bytes = static_cast<size_t>(num_left * job.dims_padded) * sizeof(float);
    std::memset(copy, 0, static_cast<size_t>(kMaxRows * job.dims_padded) * sizeof(float));
    std::memcpy(copy, sums, num_bytes);
    AddRows(job, weights, copy);
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
