#include <algorithm>
#include <cmath>
#include <cstring>

#include "blockcompact/attend_kernels.h"
#include "blockcompact/layout.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ATTEND_TARGET __attribute__((target("avx2,fma")))

namespace blockcompact::avx2 {
namespace {
#include "attend_generic.inc"

#define AVX2_INLINE ATTEND_TARGET __attribute__((always_inline)) inline

constexpr int kMaxRows = 4;  // 8 sums, 4 halves of lines and a broadcast pair fill the registers

// The elements of 32-bit words as floats, the second of a pair before the first.
template <AttendType kType>
struct Elements {
  static constexpr int kNum = kType == AttendType::kF32 ? 1 : 2;

  AVX2_INLINE static void Of(__m256i words, __m256 (&elements)[kNum]) {
    if constexpr (kType == AttendType::kF32) {
      elements[0] = _mm256_castsi256_ps(words);
    } else {
      const __m256i second = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000U));
      elements[0] = _mm256_castsi256_ps(_mm256_and_si256(words, second));
      elements[1] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    }
  }
};

// Adds the products of the words of kRows rows with lines of 16 words, in the order of AddProducts.
template <AttendType kType, int kRows>
AVX2_INLINE void AddLines(const std::byte* rows, int64_t row_bytes, const std::byte* lines,
                          int64_t num_words, __m256 (&sums)[kRows][2]) {
  constexpr int kNum = Elements<kType>::kNum;
  for (int64_t word = 0; word < num_words; ++word, rows += 4, lines += 64) {
    __m256 line[2][kNum];
    for (int half = 0; half < 2; ++half) {
      const auto* address = reinterpret_cast<const __m256i*>(lines + 32 * half);
      Elements<kType>::Of(_mm256_loadu_si256(address), line[half]);
    }
    for (int r = 0; r < kRows; ++r) {
      __m256 row[kNum];
      Elements<kType>::Of(_mm256_set1_epi32(static_cast<int32_t>(LoadWord(rows + r * row_bytes))),
                          row);
      for (int i = 0; i < kNum; ++i) {
        for (int half = 0; half < 2; ++half) {
          sums[r][half] = _mm256_fmadd_ps(row[i], line[half][i], sums[r][half]);
        }
      }
    }
  }
}

template <AttendType kType, int kRows>
ATTEND_TARGET void ScoreRows(const ScoreJob& job, int64_t first_row) {
  const int64_t num_words = job.dims_padded * static_cast<int64_t>(kType) / 4;
  const std::byte* queries = job.queries + first_row * num_words * 4;
  for (int64_t tile = 0; tile < kGroupTiles; ++tile) {
    if (first_row == 0) job.ahead.Ask(job.ahead.Of(kGroupTiles));
    __m256 sums[kRows][2] = {};
    AddLines<kType>(queries, num_words * 4, job.k_tiles[tile], num_words, sums);
    float* scores = job.scores + first_row * job.row_tokens + tile * kTileTokens;
    for (int r = 0; r < kRows; ++r, scores += job.row_tokens) {
      _mm256_storeu_ps(scores, sums[r][0]);
      _mm256_storeu_ps(scores + 8, sums[r][1]);
    }
  }
}

template <AttendType kType, int kRows>
ATTEND_TARGET void ValueRows(const ValueJob& job, int64_t first_row) {
  const int64_t bytes = static_cast<int64_t>(kType);
  const int64_t num_words = kValueTokens * bytes / 4;
  const std::byte* weights = job.weights + first_row * kRowTokens * bytes;
  for (int64_t group = 0; group < job.dims_padded / kDimsOfWord; ++group) {
    if (first_row == 0) job.ahead.Ask(job.ahead.Of(job.dims_padded / kDimsOfWord));
    float* out = job.sums + first_row * job.dims_padded + group * kDimsOfWord;
    __m256 sums[kRows][2];
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = _mm256_loadu_ps(out + r * job.dims_padded);
      sums[r][1] = _mm256_loadu_ps(out + r * job.dims_padded + 8);
    }
    for (int64_t tile = 0; tile < job.num_tiles; ++tile) {
      const VTile& v = job.v_tiles[tile];
      AddLines<kType>(weights + tile * num_words * 4, kRowTokens * bytes,
                      v.base + group * v.dim_group_stride_bytes, num_words, sums);
    }
    for (int r = 0; r < kRows; ++r) {
      _mm256_storeu_ps(out + r * job.dims_padded, sums[r][0]);
      _mm256_storeu_ps(out + r * job.dims_padded + 8, sums[r][1]);
    }
  }
}

// Calls function<number of rows>(job, first row) for up to kMaxRows rows at a time.
template <typename Job, void (*kOne)(const Job&, int64_t), void (*kTwo)(const Job&, int64_t),
          void (*kThree)(const Job&, int64_t), void (*kFour)(const Job&, int64_t)>
void ForRows(const Job& job) {
  void (*const functions[kMaxRows])(const Job&, int64_t) = {kOne, kTwo, kThree, kFour};
  for (int64_t row = 0; row < job.num_rows; row += kMaxRows) {
    functions[std::min<int64_t>(kMaxRows, job.num_rows - row) - 1](job, row);
  }
}

// Whole tiles of pairs: two dims of 16 tokens, interleaved.
ATTEND_TARGET void PackKVecPairs(const std::byte* column, int64_t num_tokens, int64_t row_stride,
                                 int64_t head_dim, std::byte* tile) {
  if (num_tokens != kTileTokens || head_dim % kDimsOfWord != 0) {
    return PackKVec<uint16_t>(column, num_tokens, row_stride, head_dim, tile);
  }
  for (int64_t d = 0; d < head_dim; d += 2, column += 4 * row_stride, tile += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(column));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(column + 2 * row_stride));
    const __m256i low = _mm256_unpacklo_epi16(a, b);  // tokens 0-3 and 8-11
    const __m256i high = _mm256_unpackhi_epi16(a, b);
    auto* words = reinterpret_cast<__m256i*>(tile);
    _mm256_storeu_si256(words, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(words + 1, _mm256_permute2x128_si256(low, high, 0x31));
  }
}

template <AttendType kType, typename T>
AttendKernels Kernels() {
  AttendKernels kernels = GenericKernels<kType, T>();
  if (kType == AttendType::kBf16) kernels.pack_k_vec = PackKVecPairs;
  kernels.score = ForRows<ScoreJob, ScoreRows<kType, 1>, ScoreRows<kType, 2>, ScoreRows<kType, 3>,
                          ScoreRows<kType, 4>>;
  kernels.value = ForRows<ValueJob, ValueRows<kType, 1>, ValueRows<kType, 2>, ValueRows<kType, 3>,
                          ValueRows<kType, 4>>;
  return kernels;
}

#undef AVX2_INLINE

}  // namespace

bool HasFma() { return __builtin_cpu_supports("fma") != 0; }

AttendKernels AttendKernelsOf(AttendType type) {
  return type == AttendType::kF32 ? Kernels<AttendType::kF32, uint32_t>()
                                  : Kernels<AttendType::kBf16, uint16_t>();
}

}  // namespace blockcompact::avx2
#endif
