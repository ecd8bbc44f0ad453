// Transpose of a register tile, shared by the AVX-512 kernels.
#pragma once

#include <immintrin.h>

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

}  // namespace blockcompact::avx512
