#include "blockcompact/rank_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "avx512_transpose.h"

namespace blockcompact::avx512 {
namespace {

constexpr int64_t kLanes = 16;

TARGET_AVX512 inline __mmask16 Lanes(int64_t count) {
  return count >= kLanes ? static_cast<__mmask16>(0xFFFF)
                         : static_cast<__mmask16>((uint32_t{1} << count) - 1);
}

TARGET_AVX512 inline __m512i Lane() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// A compressing store to memory is slow on some machines; this writes a whole register instead.
template <typename T>
TARGET_AVX512 inline void Append(T* to, __mmask16 mask, __m512i values) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, values));
}

TARGET_AVX512 inline __m512i KeysOf(__m512i bits) {
  const __m512i sign = _mm512_set1_epi32(INT32_MIN);
  bits = _mm512_maskz_mov_epi32(_mm512_cmpneq_epi32_mask(bits, sign), bits);
  // bits ^ (bits < 0 ? all : sign), in one step
  return _mm512_ternarylogic_epi32(bits, _mm512_srai_epi32(bits, 31), sign, 0x1E);
}

TARGET_AVX512 KeyRange MakeKeys(const float* scores, int64_t num_blocks, uint32_t* keys) {
  const __m512i infinity = _mm512_set1_epi32(static_cast<int32_t>(0xFF000000U));
  __m512i smallest = _mm512_set1_epi32(-1), largest = _mm512_setzero_si512();
  __m512i most = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + kLanes <= num_blocks; i += kLanes) {
    const __m512i bits = _mm512_loadu_si512(scores + i);
    const __m512i key = KeysOf(bits);
    most = _mm512_max_epu32(most, _mm512_slli_epi32(bits, 1));
    smallest = _mm512_min_epu32(smallest, key);
    largest = _mm512_max_epu32(largest, key);
    _mm512_storeu_si512(keys + i, key);
  }
  if (i < num_blocks) {
    const __mmask16 lanes = Lanes(num_blocks - i);
    const __m512i bits = _mm512_maskz_loadu_epi32(lanes, scores + i);
    const __m512i key = KeysOf(bits);
    most = _mm512_max_epu32(most, _mm512_slli_epi32(bits, 1));
    smallest = _mm512_mask_min_epu32(smallest, lanes, smallest, key);
    largest = _mm512_mask_max_epu32(largest, lanes, largest, key);
    _mm512_storeu_si512(keys + i, key);
  }
  int64_t first_non_finite = -1;
  if (__builtin_expect(_mm512_cmpge_epu32_mask(most, infinity) != 0, 0)) {
    for (i = 0; first_non_finite < 0; ++i) {
      uint32_t bits;
      std::memcpy(&bits, scores + i, sizeof(bits));
      if (bits << 1 >= 0xFF000000U) first_non_finite = i;
    }
  }
  return {first_non_finite, _mm512_reduce_min_epu32(smallest), _mm512_reduce_max_epu32(largest)};
}

TARGET_AVX512 int64_t CountAtLeast(const uint32_t* keys, int64_t num_keys, uint32_t threshold) {
  const __m512i least = _mm512_set1_epi32(static_cast<int32_t>(threshold));
  const __m512i one = _mm512_set1_epi32(1);
  __m512i counts[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                       _mm512_setzero_si512()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= num_keys; i += 4 * kLanes) {
    for (int64_t part = 0; part < 4; ++part) {
      const __m512i key = _mm512_loadu_si512(keys + i + part * kLanes);
      counts[part] = _mm512_mask_add_epi32(counts[part], _mm512_cmpge_epu32_mask(key, least),
                                           counts[part], one);
    }
  }
  for (; i < num_keys; i += kLanes) {
    const __mmask16 lanes = Lanes(num_keys - i);
    const __m512i key = _mm512_maskz_loadu_epi32(lanes, keys + i);
    counts[0] = _mm512_mask_add_epi32(counts[0], _mm512_mask_cmpge_epu32_mask(lanes, key, least),
                                      counts[0], one);
  }
  return _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_add_epi32(counts[0], counts[1]),
                                                  _mm512_add_epi32(counts[2], counts[3])));
}

TARGET_AVX512 int64_t CountScores(const float* scores, int64_t num_scores, uint32_t threshold) {
  const __m512i least = _mm512_set1_epi32(static_cast<int32_t>(threshold));
  const __m512i infinity = _mm512_set1_epi32(static_cast<int32_t>(0xFF000000U));
  __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  int64_t counts[2] = {0, 0}, i = 0;
  for (; i + 2 * kLanes <= num_scores; i += 2 * kLanes) {
    for (int64_t part = 0; part < 2; ++part) {
      const __m512i bits = _mm512_loadu_si512(scores + i + part * kLanes);
      most[part] = _mm512_max_epu32(most[part], _mm512_slli_epi32(bits, 1));
      counts[part] += __builtin_popcount(_mm512_cmpge_epu32_mask(KeysOf(bits), least));
    }
  }
  for (; i < num_scores; i += kLanes) {
    const __mmask16 lanes = Lanes(num_scores - i);
    const __m512i bits = _mm512_maskz_loadu_epi32(lanes, scores + i);
    most[0] = _mm512_max_epu32(most[0], _mm512_slli_epi32(bits, 1));
    counts[0] += __builtin_popcount(_mm512_mask_cmpge_epu32_mask(lanes, KeysOf(bits), least));
  }
  const bool is_bad = _mm512_cmpge_epu32_mask(_mm512_max_epu32(most[0], most[1]), infinity) != 0;
  return is_bad ? -1 : counts[0] + counts[1];
}

// Smallest and largest of all scores seen and of its part, as signed integers in the scores' order;
// -0.0 lies just below 0.0 there.
struct Extremes {
  __m512i smallest, largest, worst_in, best_out;
};

TARGET_AVX512 inline void SplitVector(__m512i bits, __mmask16 lanes, __mmask16 is_in,
                                      Extremes* seen) {
  const __m512i magnitude = _mm512_set1_epi32(INT32_MAX);
  // bits ^ (bits < 0 ? magnitude : 0), in one step
  const __m512i key = _mm512_ternarylogic_epi32(bits, _mm512_srai_epi32(bits, 31), magnitude, 0x78);
  const auto is_out = static_cast<__mmask16>(lanes & ~is_in);
  seen->smallest = _mm512_mask_min_epi32(seen->smallest, lanes, seen->smallest, key);
  seen->largest = _mm512_mask_max_epi32(seen->largest, lanes, seen->largest, key);
  seen->worst_in = _mm512_mask_min_epi32(seen->worst_in, is_in, seen->worst_in, key);
  seen->best_out = _mm512_mask_max_epi32(seen->best_out, is_out, seen->best_out, key);
}

// The key of a signed one.
inline uint32_t UnsignedKey(int32_t key) {
  return static_cast<uint32_t>(key == -1 ? 0 : key) ^ 0x80000000U;
}

TARGET_AVX512 bool SplitScores(const float* scores, int64_t num_scores, const uint64_t* is_in,
                               uint32_t* worst_in, uint32_t* best_out) {
  const __m512i most = _mm512_set1_epi32(INT32_MAX), least = _mm512_set1_epi32(INT32_MIN);
  Extremes seen{most, least, most, least};
  int64_t i = 0;
  for (; i + kLanes <= num_scores; i += kLanes) {
    const auto marked = static_cast<__mmask16>(is_in[i / 64] >> (i % 64));
    SplitVector(_mm512_loadu_si512(scores + i), 0xFFFF, marked, &seen);
  }
  if (i < num_scores) {
    const __mmask16 lanes = Lanes(num_scores - i);
    const auto marked = static_cast<__mmask16>(lanes & (is_in[i / 64] >> (i % 64)));
    SplitVector(_mm512_maskz_loadu_epi32(lanes, scores + i), lanes, marked, &seen);
  }
  const int32_t worst = _mm512_reduce_min_epi32(seen.worst_in);
  const int32_t best = _mm512_reduce_max_epi32(seen.best_out);
  if (worst != INT32_MAX) *worst_in = std::min(*worst_in, UnsignedKey(worst));
  if (best != INT32_MIN) *best_out = std::max(*best_out, UnsignedKey(best));
  constexpr int32_t kInfinity = 0x7F800000;
  return _mm512_reduce_max_epi32(seen.largest) < kInfinity &&
         _mm512_reduce_min_epi32(seen.smallest) > ~kInfinity;
}

TARGET_AVX512 int64_t KeepWithin(const uint32_t* keys, int64_t num_keys, uint32_t low,
                                 uint32_t high, uint32_t* kept) {
  const __m512i least = _mm512_set1_epi32(static_cast<int32_t>(low));
  const __m512i width = _mm512_set1_epi32(static_cast<int32_t>(high - low));
  int64_t count = 0, i = 0;
  for (; i + kLanes <= num_keys; i += kLanes) {
    const __m512i key = _mm512_loadu_si512(keys + i);
    const __mmask16 is_within = _mm512_cmple_epu32_mask(_mm512_sub_epi32(key, least), width);
    Append(kept + count, is_within, key);
    count += __builtin_popcount(is_within);
  }
  if (i < num_keys) {
    const __mmask16 lanes = Lanes(num_keys - i);
    const __m512i key = _mm512_maskz_loadu_epi32(lanes, keys + i);
    const __mmask16 is_within =
        _mm512_mask_cmple_epu32_mask(lanes, _mm512_sub_epi32(key, least), width);
    Append(kept + count, is_within, key);
    count += __builtin_popcount(is_within);
  }
  return count;
}

// Drops the last lanes of `tied` from `chosen` until num_tied is no longer negative.
inline __mmask16 DropTied(__mmask16 chosen, uint32_t tied, int64_t* num_tied) {
  uint32_t kept = chosen;
  for (; *num_tied < 0 && tied != 0; ++*num_tied) {
    const uint32_t last = uint32_t{1} << (31 - __builtin_clz(tied));
    kept &= ~last;
    tied &= ~last;
  }
  *num_tied = std::max<int64_t>(*num_tied, 0);
  return static_cast<__mmask16>(kept);
}

struct Listed {
  int32_t* blocks;
  uint32_t* keys;  // or null
  int64_t count;
};

template <bool kHasTies>
TARGET_AVX512 inline void ListVector(__m512i key, __mmask16 lanes, __m512i block, __m512i threshold,
                                     const uint8_t* is_excluded, int64_t* num_tied,
                                     Listed* listed) {
  __mmask16 chosen = _mm512_mask_cmpge_epu32_mask(lanes, key, threshold);
  if (kHasTies) {
    const __mmask16 tied = _mm512_mask_cmpeq_epu32_mask(chosen, key, threshold);
    *num_tied -= __builtin_popcount(tied);
    if (__builtin_expect(*num_tied < 0, 0)) chosen = DropTied(chosen, tied, num_tied);
  }
  if (is_excluded != nullptr) {
    const __m128i bytes = _mm_maskz_loadu_epi8(lanes, is_excluded);
    chosen = static_cast<__mmask16>(chosen & ~_mm_test_epi8_mask(bytes, bytes));
  }
  Append(listed->blocks + listed->count, chosen, block);
  if (listed->keys != nullptr) Append(listed->keys + listed->count, chosen, key);
  listed->count += __builtin_popcount(chosen);
}

template <bool kHasTies>
TARGET_AVX512 int64_t ListCut(const uint32_t* keys, int64_t num_keys, const KeyCut& cut,
                              const uint8_t* is_excluded, int32_t first_block, Listed listed) {
  const __m512i threshold = _mm512_set1_epi32(static_cast<int32_t>(cut.threshold));
  const __m512i step = _mm512_set1_epi32(kLanes);
  __m512i block = _mm512_add_epi32(Lane(), _mm512_set1_epi32(first_block));
  int64_t num_tied = cut.num_tied, i = 0;
  for (; i + kLanes <= num_keys; i += kLanes) {
    ListVector<kHasTies>(_mm512_loadu_si512(keys + i), 0xFFFF, block, threshold,
                         is_excluded == nullptr ? nullptr : is_excluded + i, &num_tied, &listed);
    block = _mm512_add_epi32(block, step);
  }
  if (i < num_keys) {
    const __mmask16 lanes = Lanes(num_keys - i);
    ListVector<kHasTies>(_mm512_maskz_loadu_epi32(lanes, keys + i), lanes, block, threshold,
                         is_excluded == nullptr ? nullptr : is_excluded + i, &num_tied, &listed);
  }
  return listed.count;
}

TARGET_AVX512 int64_t ListChosen(const uint32_t* keys, int64_t num_keys, const KeyCut& cut,
                                 const uint8_t* is_excluded, int32_t first_block, int32_t* blocks,
                                 uint32_t* chosen_keys) {
  const Listed listed{blocks, chosen_keys, 0};
  return cut.num_tied >= num_keys
             ? ListCut<false>(keys, num_keys, cut, is_excluded, first_block, listed)
             : ListCut<true>(keys, num_keys, cut, is_excluded, first_block, listed);
}

TARGET_AVX512 void RankFew(const uint32_t* keys, int64_t num_keys, int32_t* rank) {
  const __m512i one = _mm512_set1_epi32(1);
  for (int64_t i = 0; i < num_keys; i += kLanes) {
    const __m512i mine = _mm512_maskz_loadu_epi32(Lanes(num_keys - i), keys + i);
    __m512i better = _mm512_setzero_si512();
    const int64_t end = std::min(i + kLanes, num_keys);
    for (int64_t j = 0; j < i; ++j) {
      const __m512i other = _mm512_set1_epi32(static_cast<int32_t>(keys[j]));
      better = _mm512_mask_add_epi32(better, _mm512_cmpge_epu32_mask(other, mine), better, one);
    }
    for (int64_t j = i; j < end; ++j) {  // of equal keys the earlier place is better
      const __m512i other = _mm512_set1_epi32(static_cast<int32_t>(keys[j]));
      const __mmask16 is_later = static_cast<__mmask16>(~Lanes(j - i + 1));
      better = _mm512_mask_add_epi32(
          better,
          static_cast<__mmask16>(_mm512_cmpgt_epu32_mask(other, mine) |
                                 _mm512_mask_cmpeq_epu32_mask(is_later, other, mine)),
          better, one);
    }
    for (int64_t j = end; j < num_keys; ++j) {
      const __m512i other = _mm512_set1_epi32(static_cast<int32_t>(keys[j]));
      better = _mm512_mask_add_epi32(better, _mm512_cmpgt_epu32_mask(other, mine), better, one);
    }
    _mm512_storeu_si512(rank + i, better);
  }
}

TARGET_AVX512 int64_t ListSet(const uint8_t* bytes, int64_t num_bytes, int64_t capacity,
                              int32_t* places) {
  int64_t count = 0;
  for (int64_t i = 0; i < num_bytes && count < capacity; i += 64) {
    const int64_t left = num_bytes - i;
    const __mmask64 lanes = left >= 64 ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
    const __m512i byte = _mm512_maskz_loadu_epi8(lanes, bytes + i);
    uint64_t word = _mm512_test_epi8_mask(byte, byte);
    for (int64_t first = i; word != 0; word >>= kLanes, first += kLanes) {
      const auto part = static_cast<__mmask16>(word);
      if (part == 0) continue;
      Append(places + count, part,
             _mm512_add_epi32(Lane(), _mm512_set1_epi32(static_cast<int32_t>(first))));
      count += __builtin_popcount(part);
    }
  }
  return count;
}

}  // namespace

RankKernels RankKernelsOf() {
  return {MakeKeys,   CountAtLeast, CountScores, SplitScores,
          KeepWithin, ListChosen,   RankFew,     ListSet};
}

}  // namespace blockcompact::avx512
#endif
