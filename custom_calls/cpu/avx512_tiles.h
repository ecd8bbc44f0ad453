// Tiles of 16 tokens x 64 bytes, shared by the AVX-512 packing and unpacking kernels.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "avx512_transpose.h"
#include "blockcompact/head_kernels.h"
#include "blockcompact/streaming.h"

#define TILE_INLINE TARGET_AVX512 __attribute__((always_inline)) inline

namespace blockcompact::avx512 {

constexpr int64_t kTileRows = 16;

TILE_INLINE __m512i LoadLine(const char* from) { return _mm512_loadu_si512(from); }

template <bool kIsStreaming>
TILE_INLINE void StoreLine(char* to, __m512i line) {
  if constexpr (kIsStreaming) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
  } else {
    _mm512_storeu_si512(to, line);
  }
}

// Into the second level: what is read next must not push out what is read now. Null: nothing.
inline void PrefetchRows(const char* first, int64_t stride_bytes, int64_t count) {
  if (first == nullptr) return;
  for (int64_t i = 0; i < count; ++i) _mm_prefetch(first + i * stride_bytes, _MM_HINT_T1);
}

inline void Prefetch(const char* first, int64_t num_bytes) {
  PrefetchRows(first, kLineBytes, (num_bytes + kLineBytes - 1) / kLineBytes);
}

template <bool kIsStreaming>
TILE_INLINE void CopyRow(const char* from, char* to, int64_t num_bytes) {
  int64_t byte = 0;
  for (; byte + kLineBytes <= num_bytes; byte += kLineBytes) {
    StoreLine<kIsStreaming>(to + byte, LoadLine(from + byte));
  }
  if (byte == num_bytes) return;
  const __mmask64 mask = (uint64_t{1} << (num_bytes - byte)) - 1;
  _mm512_mask_storeu_epi8(to + byte, mask, _mm512_maskz_loadu_epi8(mask, from + byte));
}

TILE_INLINE __mmask16 Mask16(int64_t count) {
  return static_cast<__mmask16>((uint32_t{1} << count) - 1);
}

TILE_INLINE __mmask32 Mask32(int64_t count) {
  return static_cast<__mmask32>((uint64_t{1} << count) - 1);
}

// Two rows of at most 16 16-bit values, joined into 32-bit pairs.
TILE_INLINE __m512i JoinRows(const char* low, const char* high, __mmask16 values) {
  const __m512i low32 = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(values, low));
  if (high == nullptr) return low32;
  const __m512i high32 = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(values, high));
  return _mm512_or_si512(low32, _mm512_slli_epi32(high32, 16));
}

// Order of 16-bit values: the even places, then the odd ones.
TILE_INLINE __m512i EvenThenOdd() {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 16; ++i) {
    order[i] = static_cast<uint16_t>(2 * i);
    order[16 + i] = static_cast<uint16_t>(2 * i + 1);
  }
  return _mm512_load_si512(order);
}

// The reverse: value i of the first half, then value i of the second.
TILE_INLINE __m512i HalvesInTurns() {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 16; ++i) {
    order[2 * i] = static_cast<uint16_t>(i);
    order[2 * i + 1] = static_cast<uint16_t>(16 + i);
  }
  return _mm512_load_si512(order);
}

// The tiles of the jobs in turns. Kind::Tile(job, shape, token) moves kStepTokens tokens from there
// on, fewer where the job has fewer.
template <typename Kind, bool kIsStreaming>
TARGET_AVX512 void RunTiles(const HeadJob* jobs, int64_t num_jobs, const HeadShape& shape) {
  for (int64_t token = 0; token < shape.block_tokens; token += Kind::kStepTokens) {
    for (int64_t i = 0; i < num_jobs; ++i) {
      if (token < jobs[i].num_tokens) Kind::template Tile<kIsStreaming>(jobs[i], shape, token);
    }
  }
}

// Kind::IsAligned(job, shape): all lines that are written are aligned.
template <typename Kind>
void RunJobs(const HeadJob* jobs, int64_t num_jobs, const HeadShape& shape) {
  bool is_streaming = shape.is_streaming;
  for (int64_t i = 0; i < num_jobs; ++i) is_streaming &= Kind::IsAligned(jobs[i], shape);
  is_streaming ? RunTiles<Kind, true>(jobs, num_jobs, shape)
               : RunTiles<Kind, false>(jobs, num_jobs, shape);
}

// Calls Kind::Lines<n>(..., byte) for the 64-byte pieces of a row, up to kMaxLines at once.
template <typename Kind, bool kIsStreaming, int kMaxLines, typename... Args>
TILE_INLINE void ForLines(int64_t row_bytes, const Args&... args) {
  int64_t byte = 0;
  if constexpr (kMaxLines >= 4) {
    for (; byte + 4 * kLineBytes <= row_bytes; byte += 4 * kLineBytes) {
      Kind::template Lines<kIsStreaming, 4>(args..., byte);
    }
  }
  for (; byte + 2 * kLineBytes <= row_bytes; byte += 2 * kLineBytes) {
    Kind::template Lines<kIsStreaming, 2>(args..., byte);
  }
  if (byte < row_bytes) Kind::template Lines<kIsStreaming, 1>(args..., byte);
}

}  // namespace blockcompact::avx512
