#include "blockcompact/head_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

#include "avx512_pack.h"
#include "avx512_tiles.h"

namespace blockcompact::avx512 {
namespace {

// Where a few token rows of a job go. Rows are written one after the other, a whole row or as
// much of it as the registers hold: memory likes neighbouring lines together.
struct ToTokens {
  ToTokens(const HeadJob& job, const HeadShape& shape, int64_t token, int64_t num_tokens)
      : base(static_cast<char*>(job.to) + token * shape.token_stride_bytes),
        stride_bytes(shape.token_stride_bytes),
        count(std::min(num_tokens, job.num_tokens - token)) {}
  char* row(int64_t token) const { return base + token * stride_bytes; }
  char* base;
  int64_t stride_bytes;
  int64_t count;
};

template <typename T, int64_t kTokens>
struct UnpackKind {
  static constexpr int64_t kElementBytes = sizeof(T);
  static constexpr int64_t kStepTokens = kTokens;
  static ToTokens To(const HeadJob& job, const HeadShape& s, int64_t token) {
    return {job, s, token, kTokens};
  }
  static int64_t RowBytes(const HeadShape& s) { return s.head_dim * kElementBytes; }
  static bool IsAligned(const HeadJob& job, const HeadShape& s) {
    return IsLineAligned(job.to) && s.token_stride_bytes % kLineBytes == 0;
  }
  static const char* At(const void* base, int64_t bytes) {
    return base == nullptr ? nullptr : static_cast<const char*>(base) + bytes;
  }
};

template <bool kIsStreaming, int kLines>
TILE_INLINE void StoreRow(char* to, const __m512i (&lines)[kLines]) {
  for (int i = 0; i < kLines; ++i) StoreLine<kIsStreaming>(to + i * kLineBytes, lines[i]);
}

// kLines lines of kTokens token rows, those of one token written together.
template <bool kIsStreaming, int kLines, int kTokens>
TILE_INLINE void StoreRows(const ToTokens& to, int64_t byte,
                           const __m512i (&columns)[kLines][kTokens]) {
  for (int token = 0; token < kTokens; ++token) {
    if (token >= to.count) return;
    char* row = to.row(token) + byte;
    for (int line = 0; line < kLines; ++line) {
      StoreLine<kIsStreaming>(row + line * kLineBytes, columns[line][token]);
    }
  }
}

// Dims (or pairs of them) x tokens of 32-bit units, rows `stride_bytes` apart.
struct TransposedUnits {
  template <bool kIsStreaming, int kLines>
  TILE_INLINE static void Lines(const char* from, int64_t stride_bytes, const ToTokens& to,
                                int64_t byte) {
    __m512i columns[kLines][4];
    for (int line = 0; line < kLines; ++line) {
      LoadColumns(from + (byte / 4 + 16 * line) * stride_bytes, stride_bytes, columns[line]);
    }
    StoreRows<kIsStreaming>(to, byte, columns);
  }
};

// K of `amx`: for each 16 tokens a transposed matrix of 32-bit units (pairs, or single values).
template <typename T>
struct UnpackAmxK : UnpackKind<T, 4> {
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const int64_t row_bytes = UnpackAmxK::RowBytes(s);
    Prefetch(UnpackAmxK::At(job.next_from, token * row_bytes), 4 * row_bytes);
    const int64_t place = token / kTileRows * kTileRows * row_bytes + token % kTileRows * 4;
    ForLines<TransposedUnits, kIsStreaming, 4>(row_bytes, UnpackAmxK::At(job.from, place),
                                               kLineBytes, UnpackAmxK::To(job, s, token));
  }
};

// Pairs of tokens, 16 dims of both interleaved in one line.
struct TokenPairs {
  template <bool kIsStreaming, int kLines>
  TILE_INLINE static void Lines(const char* from, int64_t group_bytes, const ToTokens& to,
                                int64_t byte) {
    const __m512i order = EvenThenOdd();
    const char* pair = from + byte / 32 * group_bytes;
    for (int64_t token = 0; token < to.count; token += 2, pair += kLineBytes) {
      __m512i rows[2][kLines];
      for (int line = 0; line < kLines; ++line) {
        const __m512i low = LoadLine(pair + 2 * line * group_bytes);
        const __m512i high = LoadLine(pair + (2 * line + 1) * group_bytes);
        rows[0][line] = _mm512_permutexvar_epi16(
            order, _mm512_mask_mov_epi16(low, 0xAAAAAAAA, _mm512_slli_epi32(high, 16)));
        rows[1][line] = _mm512_permutexvar_epi16(
            order, _mm512_mask_mov_epi16(high, 0x55555555, _mm512_srli_epi32(low, 16)));
      }
      StoreRow<kIsStreaming>(to.row(token) + byte, rows[0]);
      if (token + 1 < to.count) StoreRow<kIsStreaming>(to.row(token + 1) + byte, rows[1]);
    }
  }
};

// V of `amx`, 16-bit: for each 16 dims the token pairs.
struct UnpackAmxV16 : UnpackKind<uint16_t, 4> {
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const int64_t group_bytes = 2 * s.block_tokens * kAmxTile;
    for (int64_t group = 0; group < s.head_dim / kAmxTile; ++group) {
      Prefetch(At(job.next_from, group * group_bytes + token * 32), 4 * 32);
    }
    ForLines<TokenPairs, kIsStreaming, 4>(RowBytes(s), At(job.from, token * 32), group_bytes,
                                          To(job, s, token));
  }
};

// V of `amx`, 32-bit: lines of 16 dims as they are.
struct UnpackAmxV32 : UnpackKind<uint32_t, 4> {
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const int64_t group_bytes = s.block_tokens * kLineBytes;
    const ToTokens to = To(job, s, token);
    for (int64_t row = 0; row < to.count; ++row) {
      for (int64_t byte = 0; byte < RowBytes(s); byte += kLineBytes) {
        const int64_t place = byte / kLineBytes * group_bytes + (token + row) * kLineBytes;
        Prefetch(At(job.next_from, place), kLineBytes);
        StoreLine<kIsStreaming>(to.row(row) + byte, LoadLine(At(job.from, place)));
      }
    }
  }
};

// V of `vec`: token rows as they are.
template <typename T>
struct UnpackVecV : UnpackKind<T, 4> {
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const int64_t row_bytes = UnpackVecV::RowBytes(s);
    const ToTokens to = UnpackVecV::To(job, s, token);
    Prefetch(UnpackVecV::At(job.next_from, token * row_bytes), to.count * row_bytes);
    const char* from = UnpackVecV::At(job.from, token * row_bytes);
    for (int64_t row = 0; row < to.count; ++row, from += row_bytes) {
      CopyRow<kIsStreaming>(from, to.row(row), row_bytes);
    }
  }
};

// K of `vec`, 32-bit: dims x tokens, of which the last tile may lack some.
struct UnpackVecK32 : UnpackKind<uint32_t, 4> {
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const int64_t stride_bytes = 4 * s.block_tokens;
    const ToTokens to = To(job, s, token);
    const char* from = At(job.from, 4 * token);
    if (token % 16 == 0) PrefetchRows(At(job.next_from, 4 * token), stride_bytes, s.head_dim);
    const bool is_whole = token + kStepTokens <= s.block_tokens;
    const int64_t whole_dims = is_whole ? s.head_dim / 16 * 16 : 0;
    ForLines<TransposedUnits, kIsStreaming, 4>(4 * whole_dims, from, stride_bytes, to);
    const __mmask16 tokens = Mask16(std::min(kStepTokens, s.block_tokens - token));
    for (int64_t dim = whole_dims; dim < s.head_dim; dim += 16) {
      const int64_t dims = std::min<int64_t>(16, s.head_dim - dim);
      __m512i tile[16];
      for (int i = 0; i < 16; ++i) {
        tile[i] = i < dims ? _mm512_maskz_loadu_epi32(tokens, from + (dim + i) * stride_bytes)
                           : _mm512_setzero_si512();
      }
      Transpose(tile);
      for (int i = 0; i < 16; ++i) {
        if (i < to.count) _mm512_mask_storeu_epi32(to.row(i) + 4 * dim, Mask16(dims), tile[i]);
      }
    }
  }
};

// Dims x tokens of 16-bit values.
struct TransposedHalves {
  template <bool kIsStreaming, int kLines>
  TILE_INLINE static void Lines(const char* from, int64_t stride_bytes, const ToTokens& to,
                                int64_t byte) {
    __m512i columns[kLines][8];
    for (int line = 0; line < kLines; ++line) {
      LoadColumns16(from + (byte / 2 + 32 * line) * stride_bytes, stride_bytes, columns[line]);
    }
    StoreRows<kIsStreaming>(to, byte, columns);
  }
};

// K of `vec`, 16-bit. In the last tiles two dims are joined in a 32-bit lane.
struct UnpackVecK16 : UnpackKind<uint16_t, 8> {
  template <bool kIsStreaming>
  TILE_INLINE static void Tile(const HeadJob& job, const HeadShape& s, int64_t token) {
    const int64_t stride_bytes = 2 * s.block_tokens;
    const ToTokens to = To(job, s, token);
    const char* from = At(job.from, 2 * token);
    if (token % 32 == 0) PrefetchRows(At(job.next_from, 2 * token), stride_bytes, s.head_dim);
    const bool is_whole = token + kStepTokens <= s.block_tokens;
    const int64_t whole_dims = is_whole ? s.head_dim / 32 * 32 : 0;
    ForLines<TransposedHalves, kIsStreaming, 2>(2 * whole_dims, from, stride_bytes, to);
    const __mmask16 tokens = Mask16(std::min(kStepTokens, s.block_tokens - token));
    for (int64_t dim = whole_dims; dim < s.head_dim; dim += 32) {
      const int64_t dims = std::min<int64_t>(32, s.head_dim - dim);
      __m512i tile[16];
      for (int i = 0; i < 16; ++i) {
        const char* row = from + (dim + 2 * i) * stride_bytes;
        tile[i] = 2 * i < dims
                      ? JoinRows(row, 2 * i + 1 < dims ? row + stride_bytes : nullptr, tokens)
                      : _mm512_setzero_si512();
      }
      Transpose(tile);
      for (int i = 0; i < 16; ++i) {
        if (i < to.count) _mm512_mask_storeu_epi16(to.row(i) + 2 * dim, Mask32(dims), tile[i]);
      }
    }
  }
};

TILE_INLINE void StreamStep(const char* from, char* to) {
  for (int64_t byte = 0; byte < kStreamStepBytes; byte += kLineBytes) {
    StoreLine<true>(to + byte, LoadLine(from + byte));
  }
}

}  // namespace

TARGET_AVX512 void StreamCopies(const CopyJob* jobs, int64_t num_jobs, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += kStreamStepBytes) {
    for (int64_t i = 0; i < num_jobs; ++i) {
      StreamStep(reinterpret_cast<const char*>(jobs[i].from) + byte,
                 reinterpret_cast<char*>(jobs[i].to) + byte);
    }
  }
}

HeadKernels Kernels(PackedLayout layout, int64_t element_bytes) {
  HeadKernels kernels;  // what stays null is served by the scalar kernels
  if (layout == PackedLayout::kAmx && element_bytes == 2) {
    kernels = {nullptr, nullptr, RunJobs<UnpackAmxK<uint16_t>>, RunJobs<UnpackAmxV16>};
  } else if (layout == PackedLayout::kAmx && element_bytes == 4) {
    kernels = {nullptr, nullptr, RunJobs<UnpackAmxK<uint32_t>>, RunJobs<UnpackAmxV32>};
  } else if (layout == PackedLayout::kVec && element_bytes == 2) {
    kernels = {nullptr, nullptr, RunJobs<UnpackVecK16>, RunJobs<UnpackVecV<uint16_t>>};
  } else if (layout == PackedLayout::kVec && element_bytes == 4) {
    kernels = {nullptr, nullptr, RunJobs<UnpackVecK32>, RunJobs<UnpackVecV<uint32_t>>};
  } else {
    kernels.unpack_v = RunJobs<UnpackVecV<uint8_t>>;
  }
  AddPackKernels(layout, element_bytes, &kernels);
  return kernels;
}

}  // namespace blockcompact::avx512
#endif  // __x86_64__
