#include "avx512_pack.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

#include "avx512_tiles.h"

namespace blockcompact::avx512 {
namespace {

// Up to 16 token rows of a job; asks for those of the next one.
struct FromTokens {
  FromTokens(const HeadJob& job, const HeadShape& shape, int64_t token, int64_t row_bytes)
      : base(static_cast<const char*>(job.from) + token * shape.token_stride_bytes),
        stride_bytes(shape.token_stride_bytes),
        count(std::min(kTileRows, shape.block_tokens - token)) {
    if (job.next_from == nullptr) return;
    const char* next = static_cast<const char*>(job.next_from) + token * stride_bytes;
    for (int64_t row = 0; row < count; ++row) Prefetch(next + row * stride_bytes, row_bytes);
  }
  const char* row(int64_t token) const { return base + token * stride_bytes; }
  const char* base;
  int64_t stride_bytes;
  int64_t count;
};

template <typename T>
struct PackKind {
  static constexpr int64_t kElementBytes = sizeof(T);
  static constexpr int64_t kStepTokens = kTileRows;
  static int64_t RowBytes(const HeadShape& s) { return s.head_dim * kElementBytes; }
  static bool IsAligned(const HeadJob& job, const HeadShape&) { return IsLineAligned(job.to); }
};

// K of `amx`: for each 16 tokens a transposed matrix of 32-bit units (pairs, or single values).
template <typename T>
struct PackAmxK : PackKind<T> {
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const int64_t row_bytes = PackAmxK::RowBytes(s);
    const FromTokens from(job, s, token, row_bytes);
    char* to = static_cast<char*>(job.to) + token * row_bytes;
    for (int64_t byte = 0; byte < row_bytes; byte += 16) {
      __m512i units[4];
      LoadColumns(from.base + byte, from.stride_bytes, units);
      for (int i = 0; i < 4; ++i)
        StoreLine<kIsStreaming>(to + 16 * byte + i * kLineBytes, units[i]);
    }
  }
};

// V of `amx`, 16-bit: 16 dims of a token pair interleaved in one line.
struct PackAmxV16 : PackKind<uint16_t> {
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const FromTokens from(job, s, token, RowBytes(s));
    const int64_t group_bytes = 2 * s.block_tokens * kAmxTile;
    const __m512i order = HalvesInTurns();
    for (int64_t byte = 0; byte < RowBytes(s); byte += kLineBytes) {
      __m512i low[8];
      __m512i high[8];
      for (int i = 0; i < 8; ++i) {
        const __m512i first = _mm512_permutexvar_epi16(order, LoadLine(from.row(2 * i) + byte));
        const __m512i second =
            _mm512_permutexvar_epi16(order, LoadLine(from.row(2 * i + 1) + byte));
        low[i] = _mm512_mask_mov_epi16(first, 0xAAAAAAAA, _mm512_slli_epi32(second, 16));
        high[i] = _mm512_mask_mov_epi16(second, 0x55555555, _mm512_srli_epi32(first, 16));
      }
      char* to = static_cast<char*>(job.to) + byte / 32 * group_bytes + token * 32;
      for (int i = 0; i < 8; ++i) StoreLine<kIsStreaming>(to + i * kLineBytes, low[i]);
      for (int i = 0; i < 8; ++i)
        StoreLine<kIsStreaming>(to + group_bytes + i * kLineBytes, high[i]);
    }
  }
};

// V of `amx`, 32-bit: lines of 16 dims as they are.
struct PackAmxV32 : PackKind<uint32_t> {
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const FromTokens from(job, s, token, RowBytes(s));
    for (int64_t byte = 0; byte < RowBytes(s); byte += kLineBytes) {
      char* to = static_cast<char*>(job.to) + byte * s.block_tokens + token * kLineBytes;
      for (int i = 0; i < 16; ++i) {
        StoreLine<kIsStreaming>(to + i * kLineBytes, LoadLine(from.row(i) + byte));
      }
    }
  }
};

// V of `vec`: token rows as they are.
template <typename T>
struct PackVecV : PackKind<T> {
  static bool IsAligned(const HeadJob& job, const HeadShape& s) {
    return IsLineAligned(job.to) && PackVecV::RowBytes(s) % kLineBytes == 0;
  }
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const int64_t row_bytes = PackVecV::RowBytes(s);
    const FromTokens from(job, s, token, row_bytes);
    char* to = static_cast<char*>(job.to) + token * row_bytes;
    for (int64_t row = 0; row < from.count; ++row, to += row_bytes) {
      CopyRow<kIsStreaming>(from.row(row), to, row_bytes);
    }
  }
};

// K of `vec`, 32-bit: a row of tokens for each dim. Whole tiles give whole lines.
struct PackVecK32 : PackKind<uint32_t> {
  static bool IsAligned(const HeadJob& job, const HeadShape& s) {
    return IsLineAligned(job.to) && s.block_tokens % 16 == 0 && s.head_dim % 4 == 0;
  }
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const FromTokens from(job, s, token, RowBytes(s));
    const __mmask16 tokens = Mask16(from.count);
    const int64_t stride_bytes = 4 * s.block_tokens;
    char* to = static_cast<char*>(job.to) + 4 * token;
    if constexpr (kIsStreaming) {
      for (int64_t dim = 0; dim < s.head_dim; dim += 4, to += 4 * stride_bytes) {
        __m512i lines[4];
        LoadColumns(from.base + 4 * dim, from.stride_bytes, lines);
        for (int i = 0; i < 4; ++i) StoreLine<true>(to + i * stride_bytes, lines[i]);
      }
      return;
    }
    for (int64_t dim = 0; dim < s.head_dim; dim += 16) {
      const int64_t dims = std::min<int64_t>(16, s.head_dim - dim);
      __m512i tile[16];
      for (int i = 0; i < 16; ++i) {
        tile[i] = i < from.count ? _mm512_maskz_loadu_epi32(Mask16(dims), from.row(i) + 4 * dim)
                                 : _mm512_setzero_si512();
      }
      Transpose(tile);
      for (int i = 0; i < 16; ++i) {
        if (i < dims) _mm512_mask_storeu_epi32(to + (dim + i) * stride_bytes, tokens, tile[i]);
      }
    }
  }
};

// The same of 16-bit values. Blocks of 16 tokens give lines of two dims, longer ones of 32 tokens.
struct PackVecK16 : PackKind<uint16_t> {
  static constexpr int64_t kStepTokens = 2 * kTileRows;

  static bool IsAligned(const HeadJob& job, const HeadShape& s) {
    const bool has_whole_lines = s.block_tokens == kTileRows || s.block_tokens % kStepTokens == 0;
    return IsLineAligned(job.to) && has_whole_lines && s.head_dim % 8 == 0;
  }
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    if constexpr (kIsStreaming) {
      s.block_tokens == kTileRows ? StreamPairs(job, s) : StreamRows(job, s, token);
      return;
    }
    StoreTile(job, s, token);
    if (token + kTileRows < s.block_tokens) StoreTile(job, s, token + kTileRows);
  }

  TILE_INLINE static void StreamPairs(const HeadJob& job, const HeadShape& s) {
    const FromTokens from(job, s, 0, RowBytes(s));
    const __m512i order = EvenThenOdd();
    char* to = static_cast<char*>(job.to);
    for (int64_t byte = 0; byte < RowBytes(s); byte += 16, to += 4 * kLineBytes) {
      __m512i pairs[4];
      LoadColumns(from.base + byte, from.stride_bytes, pairs);
      for (int i = 0; i < 4; ++i) {
        StoreLine<true>(to + i * kLineBytes, _mm512_permutexvar_epi16(order, pairs[i]));
      }
    }
  }

  TILE_INLINE static void StreamRows(const HeadJob& job, const HeadShape& s, int64_t token) {
    const FromTokens first(job, s, token, RowBytes(s));
    const FromTokens second(job, s, token + kTileRows, RowBytes(s));
    const __m512i order = EvenThenOdd();
    const int64_t stride_bytes = 2 * s.block_tokens;
    char* to = static_cast<char*>(job.to) + 2 * token;
    for (int64_t byte = 0; byte < RowBytes(s); byte += 16) {
      __m512i low[4];
      __m512i high[4];
      LoadColumns(first.base + byte, first.stride_bytes, low);
      LoadColumns(second.base + byte, second.stride_bytes, high);
      for (int i = 0; i < 4; ++i, to += 2 * stride_bytes) {
        const __m512i a = _mm512_permutexvar_epi16(order, low[i]);
        const __m512i b = _mm512_permutexvar_epi16(order, high[i]);
        StoreLine<true>(to, _mm512_shuffle_i64x2(a, b, 0x44));
        StoreLine<true>(to + stride_bytes, _mm512_shuffle_i64x2(a, b, 0xEE));
      }
    }
  }

  TILE_INLINE static void StoreTile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const FromTokens from(job, s, token, RowBytes(s));
    const int64_t stride_bytes = 2 * s.block_tokens;
    const __mmask16 tokens = Mask16(from.count);
    for (int64_t dim = 0; dim < s.head_dim; dim += 32) {
      const int64_t dims = std::min<int64_t>(32, s.head_dim - dim);
      __m512i tile[16];
      for (int i = 0; i < 16; ++i) {
        tile[i] = i < from.count ? _mm512_maskz_loadu_epi16(Mask32(dims), from.row(i) + 2 * dim)
                                 : _mm512_setzero_si512();
      }
      Transpose(tile);
      char* row = static_cast<char*>(job.to) + dim * stride_bytes + 2 * token;
      for (int i = 0; i < 16; ++i, row += 2 * stride_bytes) {
        if (2 * i >= dims) break;
        _mm256_mask_storeu_epi16(row, tokens, _mm512_cvtepi32_epi16(tile[i]));
        if (2 * i + 1 >= dims) break;
        _mm256_mask_storeu_epi16(row + stride_bytes, tokens,
                                 _mm512_cvtepi32_epi16(_mm512_srli_epi32(tile[i], 16)));
      }
    }
  }
};

}  // namespace

void AddPackKernels(PackedLayout layout, int64_t element_bytes, HeadKernels* kernels) {
  if (layout == PackedLayout::kAmx) {
    kernels->pack_k =
        element_bytes == 2 ? RunJobs<PackAmxK<uint16_t>> : RunJobs<PackAmxK<uint32_t>>;
    kernels->pack_v = element_bytes == 2 ? RunJobs<PackAmxV16> : RunJobs<PackAmxV32>;
  } else if (element_bytes == 2) {
    kernels->pack_k = RunJobs<PackVecK16>;
    kernels->pack_v = RunJobs<PackVecV<uint16_t>>;
  } else if (element_bytes == 4) {
    kernels->pack_k = RunJobs<PackVecK32>;
    kernels->pack_v = RunJobs<PackVecV<uint32_t>>;
  } else {
    kernels->pack_v = RunJobs<PackVecV<uint8_t>>;
  }
}

}  // namespace blockcompact::avx512
#endif  // __x86_64__
