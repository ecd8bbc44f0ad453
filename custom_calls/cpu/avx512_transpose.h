// Transpose of a register tile, shared by the AVX-512 kernels.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

namespace blockcompact::avx512 {

// Transposes a 16 x 16 tile of 32-bit values.
TARGET_AVX512 inline void Transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i low_ab = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x44);
    const __m512i high_ab = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xEE);
    const __m512i low_cd = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x44);
    const __m512i high_cd = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xEE);
    t[i] = _mm512_shuffle_i32x4(low_ab, low_cd, 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(low_ab, low_cd, 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(high_ab, high_cd, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(high_ab, high_cd, 0xDD);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

TARGET_AVX512 inline __m128i LoadQuarter(const char* row) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
}

// The first 4 columns of 16 rows of 32-bit values. Loads put quarters of registers where they
// belong, so half of the shuffles, which only one port can do, are saved.
TARGET_AVX512 inline void LoadColumns(const char* rows, int64_t stride_bytes,
                                      __m512i (&columns)[4]) {
  __m512i r[4];
  for (int i = 0; i < 4; ++i) {
    const char* row = rows + i * stride_bytes;
    r[i] = _mm512_castsi128_si512(LoadQuarter(row));
    r[i] = _mm512_inserti32x4(r[i], LoadQuarter(row + 4 * stride_bytes), 1);
    r[i] = _mm512_inserti32x4(r[i], LoadQuarter(row + 8 * stride_bytes), 2);
    r[i] = _mm512_inserti32x4(r[i], LoadQuarter(row + 12 * stride_bytes), 3);
  }
  const __m512i low_01 = _mm512_unpacklo_epi32(r[0], r[1]);
  const __m512i high_01 = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i low_23 = _mm512_unpacklo_epi32(r[2], r[3]);
  const __m512i high_23 = _mm512_unpackhi_epi32(r[2], r[3]);
  columns[0] = _mm512_unpacklo_epi64(low_01, low_23);
  columns[1] = _mm512_unpackhi_epi64(low_01, low_23);
  columns[2] = _mm512_unpacklo_epi64(high_01, high_23);
  columns[3] = _mm512_unpackhi_epi64(high_01, high_23);
}

// The first 8 columns of 32 rows of 16-bit values.
TARGET_AVX512 inline void LoadColumns16(const char* rows, int64_t stride_bytes,
                                        __m512i (&columns)[8]) {
  __m512i r[8];
  for (int i = 0; i < 8; ++i) {
    const char* row = rows + i * stride_bytes;
    r[i] = _mm512_castsi128_si512(LoadQuarter(row));
    r[i] = _mm512_inserti32x4(r[i], LoadQuarter(row + 8 * stride_bytes), 1);
    r[i] = _mm512_inserti32x4(r[i], LoadQuarter(row + 16 * stride_bytes), 2);
    r[i] = _mm512_inserti32x4(r[i], LoadQuarter(row + 24 * stride_bytes), 3);
  }
  __m512i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_epi16(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm512_unpacklo_epi32(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi32(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi32(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    columns[2 * i] = _mm512_unpacklo_epi64(r[i], r[i + 4]);
    columns[2 * i + 1] = _mm512_unpackhi_epi64(r[i], r[i + 4]);
  }
}

}  // namespace blockcompact::avx512
