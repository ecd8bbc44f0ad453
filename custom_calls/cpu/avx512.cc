#include "blockcompact/head_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

#include "avx512_transpose.h"

namespace blockcompact::avx512 {
namespace {

constexpr int64_t kLanes = 16;  // 32-bit lanes of a register

// Rows of bytes at equal distances.
struct ReadRows {
  const char* base;
  int64_t stride_bytes;
  const char* row(int64_t i) const { return base + i * stride_bytes; }
  ReadRows at(int64_t row_number, int64_t bytes) const {
    return {row(row_number) + bytes, stride_bytes};
  }
};

struct WriteRows {
  char* base;
  int64_t stride_bytes;
  char* row(int64_t i) const { return base + i * stride_bytes; }
  WriteRows at(int64_t row_number, int64_t bytes) const {
    return {row(row_number) + bytes, stride_bytes};
  }
};

TARGET_AVX512 inline __mmask16 Mask16(int64_t count) {
  return static_cast<__mmask16>((uint32_t{1} << count) - 1);
}

TARGET_AVX512 inline __mmask32 Mask32(int64_t count) {
  return static_cast<__mmask32>((uint64_t{1} << count) - 1);
}

// to[column][row] = from[row][column] for 32-bit values, at most 16 rows and columns.
TARGET_AVX512 inline void TransposeTile32(ReadRows from, WriteRows to, int64_t num_rows,
                                          int64_t num_columns) {
  __m512i tile[16];
  const __mmask16 columns = Mask16(num_columns);
  for (int i = 0; i < 16; ++i) {
    tile[i] =
        i < num_rows ? _mm512_maskz_loadu_epi32(columns, from.row(i)) : _mm512_setzero_si512();
  }
  Transpose(tile);
  const __mmask16 rows = Mask16(num_rows);
  for (int i = 0; i < 16; ++i) {
    if (i < num_columns) _mm512_mask_storeu_epi32(to.row(i), rows, tile[i]);
  }
}

TARGET_AVX512 inline void TransposeFullTile32(ReadRows from, WriteRows to) {
  __m512i tile[16];
  for (int i = 0; i < 16; ++i) tile[i] = _mm512_loadu_si512(from.row(i));
  Transpose(tile);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to.row(i), tile[i]);
}

TARGET_AVX512 void Transpose32(ReadRows from, WriteRows to, int64_t num_rows, int64_t num_columns) {
  for (int64_t column = 0; column < num_columns; column += kLanes) {
    const int64_t columns = std::min(kLanes, num_columns - column);
    for (int64_t row = 0; row < num_rows; row += kLanes) {
      const int64_t rows = std::min(kLanes, num_rows - row);
      const ReadRows from_tile = from.at(row, 4 * column);
      const WriteRows to_tile = to.at(column, 4 * row);
      if (rows == kLanes && columns == kLanes) {
        TransposeFullTile32(from_tile, to_tile);
      } else {
        TransposeTile32(from_tile, to_tile, rows, columns);
      }
    }
  }
}

// K of `amx`: for each 16 tokens a transposed matrix of 32-bit units (pairs, or single values).
template <typename T>
TARGET_AVX512 void UnpackAmxK(const void* packed, void* plain, const HeadShape& s,
                              int64_t num_tokens) {
  const int64_t units = s.head_dim * static_cast<int64_t>(sizeof(T)) / 4;
  const WriteRows to{static_cast<char*>(plain), s.token_stride_bytes};
  for (int64_t token = 0; token < num_tokens; token += kAmxTile) {
    const ReadRows from{static_cast<const char*>(packed) + token * units * 4, 64};
    Transpose32(from, to.at(token, 0), units, std::min(kAmxTile, num_tokens - token));
  }
}

template <typename T>
TARGET_AVX512 void PackAmxK(const void* plain, void* packed, const HeadShape& s) {
  const int64_t units = s.head_dim * static_cast<int64_t>(sizeof(T)) / 4;
  const ReadRows from{static_cast<const char*>(plain), s.token_stride_bytes};
  for (int64_t token = 0; token < s.block_tokens; token += kAmxTile) {
    const WriteRows to{static_cast<char*>(packed) + token * units * 4, 64};
    Transpose32(from.at(token, 0), to, kAmxTile, units);
  }
}

TARGET_AVX512 void UnpackVecK32(const void* packed, void* plain, const HeadShape& s,
                                int64_t num_tokens) {
  Transpose32({static_cast<const char*>(packed), 4 * s.block_tokens},
              {static_cast<char*>(plain), s.token_stride_bytes}, s.head_dim, num_tokens);
}

TARGET_AVX512 void PackVecK32(const void* plain, void* packed, const HeadShape& s) {
  Transpose32({static_cast<const char*>(plain), s.token_stride_bytes},
              {static_cast<char*>(packed), 4 * s.block_tokens}, s.block_tokens, s.head_dim);
}

// Two rows of at most 16 16-bit values, joined into 32-bit pairs.
TARGET_AVX512 inline __m512i JoinRows(const char* low, const char* high, __mmask16 tokens) {
  const __m512i low32 = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(tokens, low));
  if (high == nullptr) return low32;
  const __m512i high32 = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(tokens, high));
  return _mm512_or_si512(low32, _mm512_slli_epi32(high32, 16));
}

// K of `vec`, 16-bit: 32 dims x 16 tokens a tile, two dims joined in a 32-bit lane.
TARGET_AVX512 void UnpackVecK16(const void* packed, void* plain, const HeadShape& s,
                                int64_t num_tokens) {
  const ReadRows from{static_cast<const char*>(packed), 2 * s.block_tokens};
  const WriteRows to{static_cast<char*>(plain), s.token_stride_bytes};
  for (int64_t token = 0; token < num_tokens; token += kLanes) {
    const int64_t tokens = std::min(kLanes, num_tokens - token);
    for (int64_t dim = 0; dim < s.head_dim; dim += 2 * kLanes) {
      const int64_t dims = std::min(2 * kLanes, s.head_dim - dim);
      const ReadRows from_tile = from.at(dim, 2 * token);
      __m512i tile[16];
      for (int i = 0; i < 16; ++i) {
        const char* high = 2 * i + 1 < dims ? from_tile.row(2 * i + 1) : nullptr;
        tile[i] = 2 * i < dims ? JoinRows(from_tile.row(2 * i), high, Mask16(tokens))
                               : _mm512_setzero_si512();
      }
      Transpose(tile);
      for (int i = 0; i < 16; ++i) {
        if (i < tokens)
          _mm512_mask_storeu_epi16(to.row(token + i) + 2 * dim, Mask32(dims), tile[i]);
      }
    }
  }
}

TARGET_AVX512 void PackVecK16(const void* plain, void* packed, const HeadShape& s) {
  const ReadRows from{static_cast<const char*>(plain), s.token_stride_bytes};
  const WriteRows to{static_cast<char*>(packed), 2 * s.block_tokens};
  for (int64_t token = 0; token < s.block_tokens; token += kLanes) {
    const int64_t tokens = std::min(kLanes, s.block_tokens - token);
    for (int64_t dim = 0; dim < s.head_dim; dim += 2 * kLanes) {
      const int64_t dims = std::min(2 * kLanes, s.head_dim - dim);
      __m512i tile[16];
      for (int i = 0; i < 16; ++i) {
        tile[i] = i < tokens ? _mm512_maskz_loadu_epi16(Mask32(dims), from.row(token + i) + 2 * dim)
                             : _mm512_setzero_si512();
      }
      Transpose(tile);
      const WriteRows to_tile = to.at(dim, 2 * token);
      for (int i = 0; i < 16; ++i) {
        if (2 * i >= dims) break;
        _mm256_mask_storeu_epi16(to_tile.row(2 * i), Mask16(tokens),
                                 _mm512_cvtepi32_epi16(tile[i]));
        if (2 * i + 1 >= dims) break;
        _mm256_mask_storeu_epi16(to_tile.row(2 * i + 1), Mask16(tokens),
                                 _mm512_cvtepi32_epi16(_mm512_srli_epi32(tile[i], 16)));
      }
    }
  }
}

// V of `amx`, 16-bit: 16 dims of a token pair interleaved in one register.
TARGET_AVX512 void UnpackAmxV16(const void* packed, void* plain, const HeadShape& s,
                                int64_t num_tokens) {
  const WriteRows to{static_cast<char*>(plain), s.token_stride_bytes};
  const int64_t chunk_bytes = 2 * s.block_tokens * kAmxTile;
  for (int64_t token = 0; token < num_tokens; token += 2) {
    const char* from = static_cast<const char*>(packed) + token * kAmxTile * 2;
    for (int64_t dim = 0; dim < s.head_dim; dim += kAmxTile, from += chunk_bytes) {
      const __m512i pairs = _mm512_loadu_si512(from);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.row(token) + 2 * dim),
                          _mm512_cvtepi32_epi16(pairs));
      if (token + 1 == num_tokens) continue;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.row(token + 1) + 2 * dim),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
    }
  }
}

TARGET_AVX512 void PackAmxV16(const void* plain, void* packed, const HeadShape& s) {
  const ReadRows from{static_cast<const char*>(plain), s.token_stride_bytes};
  const int64_t chunk_bytes = 2 * s.block_tokens * kAmxTile;
  for (int64_t token = 0; token < s.block_tokens; token += 2) {
    char* to = static_cast<char*>(packed) + token * kAmxTile * 2;
    for (int64_t dim = 0; dim < s.head_dim; dim += kAmxTile, to += chunk_bytes) {
      _mm512_storeu_si512(
          to, JoinRows(from.row(token) + 2 * dim, from.row(token + 1) + 2 * dim, Mask16(kLanes)));
    }
  }
}

}  // namespace

HeadKernels Kernels(PackedLayout layout, int64_t element_bytes) {
  HeadKernels kernels;  // what stays null is served by the scalar kernels
  if (layout == PackedLayout::kAmx && element_bytes == 2) {
    kernels = {PackAmxK<uint16_t>, PackAmxV16, UnpackAmxK<uint16_t>, UnpackAmxV16};
  } else if (layout == PackedLayout::kAmx && element_bytes == 4) {
    kernels.pack_k = PackAmxK<uint32_t>;
    kernels.unpack_k = UnpackAmxK<uint32_t>;
  } else if (layout == PackedLayout::kVec && element_bytes == 2) {
    kernels.pack_k = PackVecK16;
    kernels.unpack_k = UnpackVecK16;
  } else if (layout == PackedLayout::kVec && element_bytes == 4) {
    kernels.pack_k = PackVecK32;
    kernels.unpack_k = UnpackVecK32;
  }
  return kernels;
}

}  // namespace blockcompact::avx512
#endif  // __x86_64__
