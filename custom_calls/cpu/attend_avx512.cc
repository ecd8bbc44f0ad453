#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "blockcompact/attend_kernels.h"
#include "blockcompact/layout.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "avx512_transpose.h"

namespace blockcompact::avx512 {
namespace {

#define ATTEND_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,fma")))

// What has no kernel of its own below.
namespace generic {
#include "attend_generic.inc"
}  // namespace generic

// Pairs widened to float32, the second before the first.
ATTEND_TARGET __attribute__((always_inline)) inline __m512 DotWidened(__m512 sum, __m512i a,
                                                                      __m512i b) {
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000U));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                        _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                         _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
}

ATTEND_TARGET inline __mmask16 LanesIn(int64_t first, int64_t begin, int64_t end) {
  const int64_t low = begin > first ? begin - first : 0;
  const int64_t high = end - first < 16 ? end - first : 16;
  if (low >= high) return 0;
  return static_cast<__mmask16>(((1U << high) - 1U) & ~((1U << low) - 1U));
}

// As generic::Exp2 in `lanes`, 0 in the others.
ATTEND_TARGET __attribute__((always_inline)) inline __m512 Exp2(__m512 x, __mmask16 lanes) {
  const __m512 magic = _mm512_set1_ps(12582912.0F);
  const __m512 power = _mm512_sub_ps(_mm512_add_ps(x, magic), magic);
  const __m512 r = _mm512_sub_ps(x, power);
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.32647273e-3F), r, _mm512_set1_ps(9.67151299e-3F));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.55073358e-2F));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.40222424e-1F));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.93147004e-1F));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0F));
  const __mmask16 is_normal =
      _mm512_mask_cmp_ps_mask(lanes, x, _mm512_set1_ps(-126.0F), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(is_normal, y, power);
}

ATTEND_TARGET inline __m256i RoundBf16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

// While it lives, results below the smallest normal float are zero, and so are such operands: they
// would cost a hundred cycles each.
class TinyAsZero {
 public:
  explicit TinyAsZero(bool is_on) : is_on_(is_on), before_(is_on ? _mm_getcsr() : 0) {
    constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
    if (is_on_) _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero);
  }
  ~TinyAsZero() {
    if (is_on_) _mm_setcsr(before_);
  }
  TinyAsZero(const TinyAsZero&) = delete;
  TinyAsZero& operator=(const TinyAsZero&) = delete;

 private:
  const bool is_on_;
  const unsigned before_;
};

ATTEND_TARGET inline __m512i RoundBf16Pair(__m512 first, __m512 second) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(RoundBf16(first)), RoundBf16(second), 1);
}

#include "attend_avx512_blocks.inc"

template <int kLines>
ATTEND_TARGET
    __attribute__((always_inline)) inline void Exp2OfLines(const __mmask16 (&seen)[kLines],
                                                           __m512 (&lines)[kLines]) {
  for (int i = 0; i < kLines; ++i) lines[i] = Exp2(lines[i], seen[i]);
}

namespace widened {
#define ATTEND_ROUND_BF16_PAIR RoundBf16Pair
#define ATTEND_DOT_BF16 DotWidened
#define ATTEND_EXP2_BF16(is_whole, seen, lines) Exp2OfLines(seen, lines)
#include "attend_avx512.inc"
#undef ATTEND_EXP2_BF16
#undef ATTEND_DOT_BF16
#undef ATTEND_ROUND_BF16_PAIR
}  // namespace widened

// Bytes [begin, begin + 64) of a row, zeros past `end`. A whole row has them all.
template <bool kIsWhole>
ATTEND_TARGET __attribute__((always_inline)) inline __m512i LoadRow(const std::byte* row,
                                                                    int64_t begin, int64_t end) {
  if constexpr (kIsWhole) return _mm512_loadu_si512(row + begin);
  if (row == nullptr || begin >= end) return _mm512_setzero_si512();
  const int64_t count = end - begin;
  const __mmask64 mask = count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  return _mm512_maskz_loadu_epi8(mask, row + begin);
}

bool AreWhole(const std::byte* const* rows, int64_t num_rows, int64_t row_bytes) {
  if (row_bytes % 64 != 0) return false;
  for (int64_t t = 0; t < num_rows; ++t) {
    if (rows[t] == nullptr) return false;
  }
  return true;
}

template <bool kIsWhole>
ATTEND_TARGET void PackKRows(const std::byte* const* rows, int64_t row_bytes, int64_t num_words,
                             std::byte* tile) {
  for (int64_t word = 0; word < num_words; word += 16) {
    __m512i lines[16];
    for (int t = 0; t < 16; ++t) lines[t] = LoadRow<kIsWhole>(rows[t], 4 * word, row_bytes);
    Transpose(lines);
    const int64_t count = kIsWhole || num_words - word > 16 ? 16 : num_words - word;
    for (int i = 0; i < 16; ++i) {
      if (i < count) _mm512_storeu_si512(tile + 64 * (word + i), lines[i]);
    }
  }
}

template <int kBytes>
void PackK(const std::byte* const* rows, int64_t head_dim, std::byte* tile) {
  const int64_t row_bytes = head_dim * kBytes;
  const int64_t num_words = PaddedDims(head_dim) * kBytes / 4;
  AreWhole(rows, kTileTokens, row_bytes) ? PackKRows<true>(rows, row_bytes, num_words, tile)
                                         : PackKRows<false>(rows, row_bytes, num_words, tile);
}

ATTEND_TARGET void PackV32(const std::byte* const* rows, int64_t head_dim, std::byte* tile) {
  for (int64_t group = 0; group < PaddedDims(head_dim) / kDimsOfWord; ++group) {
    for (int64_t t = 0; t < kValueTokens; ++t) {
      _mm512_storeu_si512(tile + (group * kValueTokens + t) * 64,
                          LoadRow<false>(rows[t], 64 * group, 4 * head_dim));
    }
  }
}

// Element i of `a` beside element i of `b`, for 16 elements from `first` on.
ATTEND_TARGET inline __m512i InterleaveIndex(int first) {
  alignas(64) uint16_t index[32];
  for (int i = 0; i < 16; ++i) {
    index[2 * i] = static_cast<uint16_t>(first + i);
    index[2 * i + 1] = static_cast<uint16_t>(32 + first + i);
  }
  return _mm512_load_si512(index);
}

template <bool kIsWhole>
ATTEND_TARGET void PackV16Rows(const std::byte* const* rows, int64_t row_bytes, int64_t num_groups,
                               std::byte* tile) {
  const __m512i low = InterleaveIndex(0);
  const __m512i high = InterleaveIndex(16);
  constexpr int64_t kGroupBytes = kVStrideElements * 2;
  for (int64_t group = 0; group < num_groups; group += 2) {
    for (int64_t pair = 0; pair < kValueTokens / 2; ++pair) {
      const __m512i a = LoadRow<kIsWhole>(rows[2 * pair], 32 * group, row_bytes);
      const __m512i b = LoadRow<kIsWhole>(rows[2 * pair + 1], 32 * group, row_bytes);
      std::byte* line = tile + group * kGroupBytes + 64 * pair;
      _mm512_storeu_si512(line, _mm512_permutex2var_epi16(a, low, b));
      if (kIsWhole || group + 1 < num_groups) {
        _mm512_storeu_si512(line + kGroupBytes, _mm512_permutex2var_epi16(a, high, b));
      }
    }
  }
}

void PackV16(const std::byte* const* rows, int64_t head_dim, std::byte* tile) {
  const int64_t row_bytes = 2 * head_dim;
  const int64_t num_groups = PaddedDims(head_dim) / kDimsOfWord;
  AreWhole(rows, kValueTokens, row_bytes) ? PackV16Rows<true>(rows, row_bytes, num_groups, tile)
                                          : PackV16Rows<false>(rows, row_bytes, num_groups, tile);
}

// Whole tiles: two dims of 16 tokens lie 16 elements or more apart.
ATTEND_TARGET void PackKVecPairs(const std::byte* column, int64_t row_bytes, int64_t num_words,
                                 std::byte* tile) {
  alignas(64) uint16_t index[32];
  for (int i = 0; i < 32; ++i) index[i] = static_cast<uint16_t>(i % 2 * 16 + i / 2);
  const __m512i interleave = _mm512_load_si512(index);
  if (row_bytes == 2 * kTileTokens) {  // both dims are one line
    for (int64_t byte = 0; byte < 64 * num_words; byte += 64) {
      const __m512i both = _mm512_loadu_si512(column + byte);
      _mm512_storeu_si512(tile + byte, _mm512_permutexvar_epi16(interleave, both));
    }
    return;
  }
  for (int64_t word = 0; word < num_words; ++word, column += 2 * row_bytes) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(column));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(column + row_bytes));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    _mm512_storeu_si512(tile + 64 * word, _mm512_permutexvar_epi16(interleave, both));
  }
}

template <int kBytes>
ATTEND_TARGET void PackKVec(const std::byte* column, int64_t num_tokens, int64_t row_stride,
                            int64_t head_dim, std::byte* tile) {
  constexpr int64_t kPair = PairElements(kBytes);
  if (kPair == 2 && num_tokens == kTileTokens && head_dim % kDimsOfWord == 0) {
    return PackKVecPairs(column, row_stride * kBytes, head_dim / kPair, tile);
  }
  const __m512i low = InterleaveIndex(0);
  for (int64_t word = 0; word < PaddedDims(head_dim) / kPair; ++word) {
    const int64_t d = word * kPair;
    const std::byte* row = column + d * row_stride * kBytes;
    __m512i line = LoadRow<false>(d < head_dim ? row : nullptr, 0, num_tokens * kBytes);
    if constexpr (kPair == 2) {
      const std::byte* next = d + 1 < head_dim ? row + row_stride * kBytes : nullptr;
      line = _mm512_permutex2var_epi16(line, low, LoadRow<false>(next, 0, num_tokens * kBytes));
    }
    _mm512_storeu_si512(tile + 64 * word, line);
  }
}

// Order of bf16 as that of the float32 it widens to.
ATTEND_TARGET inline __m512i WidenOrder(__m256i order) {
  const __m512i wide = _mm512_cvtepi16_epi32(order);
  const __m512i ones = _mm512_srli_epi32(_mm512_srai_epi32(wide, 31), 16);
  return _mm512_or_si512(_mm512_slli_epi32(wide, 16), ones);
}

// Bounds of 32 dims of bf16, in the order of integers.
ATTEND_TARGET void AddBounds16(const char* lines, int64_t num_tokens, int32_t* minimum,
                               int32_t* maximum) {
  __m512i low = _mm512_set1_epi16(INT16_MAX);
  __m512i high = _mm512_set1_epi16(INT16_MIN);
  for (int64_t token = 0; token < num_tokens; token += 4) {
    __m512i tokens[4];
    LoadColumns(lines + 4 * token, 64, tokens);
    for (int i = 0; i < 4 && token + i < num_tokens; ++i) {
      const __m512i flip = _mm512_srli_epi16(_mm512_srai_epi16(tokens[i], 15), 1);
      const __m512i order = _mm512_xor_si512(tokens[i], flip);
      low = _mm512_min_epi16(low, order);
      high = _mm512_max_epi16(high, order);
    }
  }
  for (int half = 0; half < 2; ++half, minimum += 16, maximum += 16) {
    const __m256i low_half =
        half == 0 ? _mm512_castsi512_si256(low) : _mm512_extracti64x4_epi64(low, 1);
    const __m256i high_half =
        half == 0 ? _mm512_castsi512_si256(high) : _mm512_extracti64x4_epi64(high, 1);
    _mm512_storeu_si512(minimum,
                        _mm512_min_epi32(_mm512_loadu_si512(minimum), WidenOrder(low_half)));
    _mm512_storeu_si512(maximum,
                        _mm512_max_epi32(_mm512_loadu_si512(maximum), WidenOrder(high_half)));
  }
}

// The same of 16 dims of float32.
ATTEND_TARGET void AddBounds32(const char* lines, int64_t num_tokens, int32_t* minimum,
                               int32_t* maximum) {
  __m512i low = _mm512_loadu_si512(minimum);
  __m512i high = _mm512_loadu_si512(maximum);
  for (int64_t token = 0; token < num_tokens; token += 4) {
    __m512i tokens[4];
    LoadColumns(lines + 4 * token, 64, tokens);
    for (int i = 0; i < 4 && token + i < num_tokens; ++i) {
      const __m512i flip = _mm512_srli_epi32(_mm512_srai_epi32(tokens[i], 31), 1);
      const __m512i order = _mm512_xor_si512(tokens[i], flip);
      low = _mm512_min_epi32(low, order);
      high = _mm512_max_epi32(high, order);
    }
  }
  _mm512_storeu_si512(minimum, low);
  _mm512_storeu_si512(maximum, high);
}

template <AttendType kType>
void Bounds(const BoundsJob& job) {
  const int64_t dims_at_once = kType == AttendType::kBf16 ? 32 : 16;
  if (job.dims_padded % dims_at_once != 0) return generic::Bounds<kType>(job);
  const char* lines = reinterpret_cast<const char*>(job.k_tile);
  for (int64_t dim = 0; dim < job.dims_padded; dim += dims_at_once, lines += 1024) {
    const auto add = kType == AttendType::kBf16 ? AddBounds16 : AddBounds32;
    add(lines, job.num_tokens, job.minimum + dim, job.maximum + dim);
  }
}

#undef ATTEND_TARGET
#define ATTEND_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16")))

// 2^x for x <= 0 within 3e-6 of it, where bf16 keeps 4e-3, in place; where not the whole is seen, 0
// in other lanes. 2^0 is 1. Expects TinyAsZero.
template <int kLines>
ATTEND_TARGET __attribute__((always_inline)) inline void Exp2ForBf16(
    bool is_whole, const __mmask16 (&seen)[kLines], __m512 (&lines)[kLines]) {
  constexpr int kFromFloor = 1;
  constexpr float kFactors[] = {5.22424717e-2F, 2.41280206e-1F, 6.93044845e-1F, 1.0F};
  __m512 r[kLines];
  __m512 y[kLines];
  for (int i = 0; i < kLines; ++i) r[i] = _mm512_reduce_ps(lines[i], kFromFloor);
  for (__m512& power : y) power = _mm512_set1_ps(1.34266858e-2F);
  for (const float factor : kFactors) {
    for (int i = 0; i < kLines; ++i) y[i] = _mm512_fmadd_ps(y[i], r[i], _mm512_set1_ps(factor));
  }
  for (int i = 0; i < kLines; ++i) {  // by 2^floor(x)
    lines[i] = is_whole ? _mm512_scalef_ps(y[i], lines[i])
                        : _mm512_maskz_scalef_ps(seen[i], y[i], lines[i]);
  }
}

namespace paired {
#define ATTEND_ROUND_BF16_PAIR(first, second) \
  reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh((second), (first)))
#define ATTEND_EXP2_BF16 Exp2ForBf16
#define ATTEND_DOT_BF16(sum, a, b) \
  _mm512_dpbf16_ps((sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b))
#include "attend_avx512.inc"
#undef ATTEND_DOT_BF16
#undef ATTEND_EXP2_BF16
#undef ATTEND_ROUND_BF16_PAIR
}  // namespace paired

// Weights that are not rounded keep their precision.
template <void (*kRounded)(const SoftmaxJob&)>
void SoftmaxForBf16(const SoftmaxJob& job) {
  job.weights == nullptr ? widened::Softmax<AttendType::kF32>(job) : kRounded(job);
}

#undef ATTEND_TARGET

}  // namespace

bool HasPairProducts() {
  return __builtin_cpu_supports("avx512bf16") != 0 && __builtin_cpu_supports("avx512dq") != 0;
}

AttendKernels AttendKernelsOf(AttendType type, bool has_pair_products) {
  AttendKernels kernels = generic::GenericKernels<AttendType::kBf16, uint16_t>();
  kernels.softmax = has_pair_products ? SoftmaxForBf16<paired::Softmax<AttendType::kBf16>>
                                      : SoftmaxForBf16<widened::Softmax<AttendType::kBf16>>;
  kernels.sums = Sums;
  kernels.maxima = Maxima;
  kernels.bounds = Bounds<AttendType::kBf16>;
  if (type == AttendType::kF32) {
    kernels.softmax = widened::Softmax<AttendType::kF32>;
    kernels.bounds = Bounds<AttendType::kF32>;
    kernels.pack_k = PackK<4>;
    kernels.pack_v = PackV32;
    kernels.pack_k_vec = PackKVec<4>;
    kernels.score = widened::Score<AttendType::kF32>;
    kernels.value = widened::Value<AttendType::kF32>;
    return kernels;
  }
  kernels.pack_k = PackK<2>;
  kernels.pack_v = PackV16;
  kernels.pack_k_vec = PackKVec<2>;
  kernels.score =
      has_pair_products ? paired::Score<AttendType::kBf16> : widened::Score<AttendType::kBf16>;
  kernels.value =
      has_pair_products ? paired::Value<AttendType::kBf16> : widened::Value<AttendType::kBf16>;
  return kernels;
}

}  // namespace blockcompact::avx512
#endif
