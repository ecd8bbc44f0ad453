#include "blockcompact/head_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

#include "blockcompact/streaming.h"
#include "scalar.h"

#define TARGET_AVX2 __attribute__((target("avx2")))

namespace blockcompact::avx2 {
namespace {

using scalar::ForJobs;
using scalar::PackRange;
using scalar::UnpackRange;

constexpr int64_t kLanes = 8;  // 32-bit lanes of a register

TARGET_AVX2 inline __m256i Load(const char* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

TARGET_AVX2 inline void Store(char* to, __m256i value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
}

TARGET_AVX2 inline __m128i LoadHalf(const char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

TARGET_AVX2 inline void StoreHalf(char* to, __m128i value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
}

// Transposes an 8 x 8 tile of 32-bit values.
TARGET_AVX2 inline void Transpose(__m256i (&r)[8]) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

// to[column][row] = from[row][column]; num_rows is a multiple of 8, and whole tiles can be read
// over the columns. Only num_columns rows of `to` are written.
TARGET_AVX2 void Transpose32(const char* from, int64_t from_stride_bytes, char* to,
                             int64_t to_stride_bytes, int64_t num_rows, int64_t num_columns) {
  for (int64_t column = 0; column < num_columns; column += kLanes) {
    const int64_t columns = std::min(kLanes, num_columns - column);
    for (int64_t row = 0; row < num_rows; row += kLanes) {
      __m256i tile[8];
      for (int i = 0; i < 8; ++i) tile[i] = Load(from + (row + i) * from_stride_bytes + 4 * column);
      Transpose(tile);
      for (int i = 0; i < 8; ++i) {
        if (i < columns) Store(to + (column + i) * to_stride_bytes + 4 * row, tile[i]);
      }
    }
  }
}

// 64 bytes of a token row, in two halves.
template <bool kIsStreaming>
TARGET_AVX2 inline void StoreLine(char* to, __m256i low, __m256i high) {
  if constexpr (kIsStreaming) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
  } else {
    Store(to, low);
    Store(to + 32, high);
  }
}

inline void PrefetchLines(const char* first, int count) {
  for (int i = 0; i < count; ++i) _mm_prefetch(first + i * kLineBytes, _MM_HINT_T1);
}

// K of `amx`: for each 16 tokens a transposed matrix of 32-bit units (pairs, or single values).
// A tile is 8 tokens x 64 bytes.
template <typename T>
struct UnpackAmxK {
  static constexpr int64_t kElementBytes = sizeof(T);
  template <bool kIsStreaming>
  TARGET_AVX2 static void Tile(const HeadJob& job, const HeadShape& s, int64_t token,
                               int64_t byte) {
    const int64_t row_bytes = s.head_dim * kElementBytes;
    const int64_t place = token / kAmxTile * kAmxTile * row_bytes + byte * kAmxTile;
    const char* from = static_cast<const char*>(job.from) + place + token % kAmxTile * 4;
    if (job.next_from != nullptr && token % kAmxTile == 0) {
      PrefetchLines(static_cast<const char*>(job.next_from) + place, 16);
    }
    __m256i low[8];
    __m256i high[8];
    for (int i = 0; i < 8; ++i) {
      low[i] = Load(from + i * kLineBytes);
      high[i] = Load(from + (8 + i) * kLineBytes);
    }
    Transpose(low);
    Transpose(high);
    char* to = static_cast<char*>(job.to) + token * s.token_stride_bytes + byte;
    const int64_t count = std::min(kLanes, job.num_tokens - token);
    for (int i = 0; i < 8; ++i) {
      if (i < count) StoreLine<kIsStreaming>(to + i * s.token_stride_bytes, low[i], high[i]);
    }
  }
};

// The low halves of eight 32-bit lanes of each, in order.
TARGET_AVX2 inline __m256i JoinLowHalves(__m256i a, __m256i b) {
  const __m256i mask = _mm256_set1_epi32(0xFFFF);
  const __m256i joined = _mm256_packus_epi32(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
  return _mm256_permute4x64_epi64(joined, 0xD8);
}

// V of `amx`, 16-bit: 16 dims of a token pair interleaved in one line.
struct UnpackAmxV16 {
  static constexpr int64_t kElementBytes = 2;
  template <bool kIsStreaming>
  TARGET_AVX2 static void Tile(const HeadJob& job, const HeadShape& s, int64_t token,
                               int64_t byte) {
    const int64_t group_bytes = 2 * s.block_tokens * kAmxTile;
    const int64_t place = byte / 32 * group_bytes + token * 32;
    const char* from = static_cast<const char*>(job.from) + place;
    if (job.next_from != nullptr) {
      const char* next = static_cast<const char*>(job.next_from) + place;
      PrefetchLines(next, 4);
      PrefetchLines(next + group_bytes, 4);
    }
    const int64_t count = std::min(kLanes, job.num_tokens - token);
    char* to = static_cast<char*>(job.to) + token * s.token_stride_bytes + byte;
    for (int64_t i = 0; i < count; i += 2, from += kLineBytes, to += 2 * s.token_stride_bytes) {
      const __m256i a = Load(from);
      const __m256i b = Load(from + 32);
      const __m256i c = Load(from + group_bytes);
      const __m256i d = Load(from + group_bytes + 32);
      StoreLine<kIsStreaming>(to, JoinLowHalves(a, b), JoinLowHalves(c, d));
      if (i + 1 == count) break;
      StoreLine<kIsStreaming>(to + s.token_stride_bytes,
                              JoinLowHalves(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)),
                              JoinLowHalves(_mm256_srli_epi32(c, 16), _mm256_srli_epi32(d, 16)));
    }
  }
};

// The tiles of the jobs in turns.
template <typename Kind, bool kIsStreaming>
TARGET_AVX2 void RunTiles(const HeadJob* jobs, int64_t num_jobs, const HeadShape& shape) {
  const int64_t row_bytes = shape.head_dim * Kind::kElementBytes;
  for (int64_t token = 0; token < shape.block_tokens; token += kLanes) {
    for (int64_t byte = 0; byte < row_bytes; byte += kLineBytes) {
      for (int64_t i = 0; i < num_jobs; ++i) {
        if (token < jobs[i].num_tokens) {
          Kind::template Tile<kIsStreaming>(jobs[i], shape, token, byte);
        }
      }
    }
  }
}

template <typename Kind>
void RunJobs(const HeadJob* jobs, int64_t num_jobs, const HeadShape& shape) {
  bool is_streaming = shape.is_streaming && shape.token_stride_bytes % kLineBytes == 0;
  for (int64_t i = 0; i < num_jobs; ++i) is_streaming &= IsLineAligned(jobs[i].to);
  is_streaming ? RunTiles<Kind, true>(jobs, num_jobs, shape)
               : RunTiles<Kind, false>(jobs, num_jobs, shape);
}

// Rows of the next block that are packed after this one.
inline void PrefetchTokens(const HeadJob& job, const HeadShape& s, int64_t token, int64_t byte,
                           int64_t num_tokens) {
  if (job.next_from == nullptr || byte % kLineBytes != 0) return;
  const char* next = static_cast<const char*>(job.next_from) + byte;
  for (int64_t i = 0; i < num_tokens; ++i) {
    _mm_prefetch(next + (token + i) * s.token_stride_bytes, _MM_HINT_T1);
  }
}

// K of `amx`, packed in the order of its lines: 16 tokens x 32 bytes are eight of them.
template <typename T>
struct PackAmxK {
  template <bool kIsStreaming>
  TARGET_AVX2 static void Run(const HeadJob* jobs, int64_t num_jobs, const HeadShape& s) {
    const int64_t row_bytes = s.head_dim * static_cast<int64_t>(sizeof(T));
    for (int64_t token = 0; token < s.block_tokens; token += kAmxTile) {
      for (int64_t byte = 0; byte < row_bytes; byte += 32) {
        for (int64_t i = 0; i < num_jobs; ++i) {
          PrefetchTokens(jobs[i], s, token, byte, kAmxTile);
          Tile<kIsStreaming>(
              static_cast<const char*>(jobs[i].from) + token * s.token_stride_bytes + byte,
              static_cast<char*>(jobs[i].to) + token * row_bytes + byte * kAmxTile,
              s.token_stride_bytes);
        }
      }
    }
  }

  template <bool kIsStreaming>
  TARGET_AVX2 static void Tile(const char* from, char* to, int64_t token_stride_bytes) {
    __m256i low[8];
    __m256i high[8];
    for (int i = 0; i < 8; ++i) {
      low[i] = Load(from + i * token_stride_bytes);
      high[i] = Load(from + (8 + i) * token_stride_bytes);
    }
    Transpose(low);
    Transpose(high);
    for (int i = 0; i < 8; ++i) StoreLine<kIsStreaming>(to + i * kLineBytes, low[i], high[i]);
  }
};

// V of `amx`, 16-bit: a line is 16 dims of a token pair, interleaved.
struct PackAmxV16 {
  template <bool kIsStreaming>
  TARGET_AVX2 static void Run(const HeadJob* jobs, int64_t num_jobs, const HeadShape& s) {
    for (int64_t byte = 0; byte < 2 * s.head_dim; byte += 32) {
      for (int64_t token = 0; token < s.block_tokens; token += kLanes) {
        for (int64_t i = 0; i < num_jobs; ++i) {
          PrefetchTokens(jobs[i], s, token, byte, kLanes);
          Tile<kIsStreaming>(
              static_cast<const char*>(jobs[i].from) + token * s.token_stride_bytes + byte,
              static_cast<char*>(jobs[i].to) + byte * s.block_tokens + token * 32,
              s.token_stride_bytes);
        }
      }
    }
  }

  template <bool kIsStreaming>
  TARGET_AVX2 static void Tile(const char* from, char* to, int64_t token_stride_bytes) {
    for (int64_t token = 0; token < kLanes; token += 2, to += kLineBytes) {
      const __m256i a = Load(from + token * token_stride_bytes);
      const __m256i b = Load(from + (token + 1) * token_stride_bytes);
      const __m256i low = _mm256_unpacklo_epi16(a, b);
      const __m256i high = _mm256_unpackhi_epi16(a, b);
      StoreLine<kIsStreaming>(to, _mm256_permute2x128_si256(low, high, 0x20),
                              _mm256_permute2x128_si256(low, high, 0x31));
    }
  }
};

// Packed regions are dense: only where they start decides whether lines can be streamed.
template <typename Kind>
void RunPackJobs(const HeadJob* jobs, int64_t num_jobs, const HeadShape& shape) {
  bool is_streaming = shape.is_streaming;
  for (int64_t i = 0; i < num_jobs; ++i) is_streaming &= IsLineAligned(jobs[i].to);
  is_streaming ? Kind::template Run<true>(jobs, num_jobs, shape)
               : Kind::template Run<false>(jobs, num_jobs, shape);
}

int64_t WholeTiles(int64_t count, int64_t tile) { return count - count % tile; }

TARGET_AVX2 void UnpackVecK32(const void* packed, void* plain, const HeadShape& s,
                              int64_t num_tokens) {
  const int64_t dims = WholeTiles(s.head_dim, kLanes);
  const int64_t tokens = std::min(num_tokens, WholeTiles(s.block_tokens, kLanes));
  Transpose32(static_cast<const char*>(packed), 4 * s.block_tokens, static_cast<char*>(plain),
              s.token_stride_bytes, dims, tokens);
  const auto offset = [&](int64_t t, int64_t d) { return VecKOffset(t, d, s.block_tokens); };
  UnpackRange<uint32_t>(packed, plain, s.token_stride_bytes, {0, tokens}, {dims, s.head_dim},
                        offset);
  UnpackRange<uint32_t>(packed, plain, s.token_stride_bytes, {tokens, num_tokens}, {0, s.head_dim},
                        offset);
}

TARGET_AVX2 void PackVecK32(const void* plain, void* packed, const HeadShape& s, int64_t) {
  const int64_t dims = WholeTiles(s.head_dim, kLanes);
  const int64_t tokens = WholeTiles(s.block_tokens, kLanes);
  Transpose32(static_cast<const char*>(plain), s.token_stride_bytes, static_cast<char*>(packed),
              4 * s.block_tokens, tokens, dims);
  const auto offset = [&](int64_t t, int64_t d) { return VecKOffset(t, d, s.block_tokens); };
  PackRange<uint32_t>(plain, s.token_stride_bytes, packed, {0, tokens}, {dims, s.head_dim}, offset);
  PackRange<uint32_t>(plain, s.token_stride_bytes, packed, {tokens, s.block_tokens},
                      {0, s.head_dim}, offset);
}

// The low halves of eight 32-bit lanes, in order.
TARGET_AVX2 inline __m128i LowHalves(__m256i lanes) {
  const __m256i low = _mm256_and_si256(lanes, _mm256_set1_epi32(0xFFFF));
  return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}

// K of `vec`, 16-bit: 16 dims x 8 tokens a tile, two dims joined in a 32-bit lane.
TARGET_AVX2 void UnpackVecK16(const void* packed, void* plain, const HeadShape& s,
                              int64_t num_tokens) {
  const int64_t dims = WholeTiles(s.head_dim, 2 * kLanes);
  const int64_t tokens = std::min(num_tokens, WholeTiles(s.block_tokens, kLanes));
  const int64_t row_bytes = 2 * s.block_tokens;
  for (int64_t token = 0; token < tokens; token += kLanes) {
    char* to = static_cast<char*>(plain) + token * s.token_stride_bytes;
    for (int64_t dim = 0; dim < dims; dim += 2 * kLanes) {
      const char* from = static_cast<const char*>(packed) + dim * row_bytes + 2 * token;
      __m256i tile[8];
      for (int i = 0; i < 8; ++i, from += 2 * row_bytes) {
        const __m128i low = LoadHalf(from);
        const __m128i high = LoadHalf(from + row_bytes);
        tile[i] = _mm256_set_m128i(_mm_unpackhi_epi16(low, high), _mm_unpacklo_epi16(low, high));
      }
      Transpose(tile);
      for (int i = 0; i < 8; ++i) {
        if (token + i < tokens) Store(to + i * s.token_stride_bytes + 2 * dim, tile[i]);
      }
    }
  }
  const auto offset = [&](int64_t t, int64_t d) { return VecKOffset(t, d, s.block_tokens); };
  UnpackRange<uint16_t>(packed, plain, s.token_stride_bytes, {0, tokens}, {dims, s.head_dim},
                        offset);
  UnpackRange<uint16_t>(packed, plain, s.token_stride_bytes, {tokens, num_tokens}, {0, s.head_dim},
                        offset);
}

TARGET_AVX2 void PackVecK16(const void* plain, void* packed, const HeadShape& s, int64_t) {
  const int64_t dims = WholeTiles(s.head_dim, 2 * kLanes);
  const int64_t tokens = WholeTiles(s.block_tokens, kLanes);
  const int64_t row_bytes = 2 * s.block_tokens;
  for (int64_t token = 0; token < tokens; token += kLanes) {
    const char* from = static_cast<const char*>(plain) + token * s.token_stride_bytes;
    for (int64_t dim = 0; dim < dims; dim += 2 * kLanes) {
      __m256i tile[8];
      for (int i = 0; i < 8; ++i) tile[i] = Load(from + i * s.token_stride_bytes + 2 * dim);
      Transpose(tile);
      char* to = static_cast<char*>(packed) + dim * row_bytes + 2 * token;
      for (int i = 0; i < 8; ++i, to += 2 * row_bytes) {
        StoreHalf(to, LowHalves(tile[i]));
        StoreHalf(to + row_bytes, LowHalves(_mm256_srli_epi32(tile[i], 16)));
      }
    }
  }
  const auto offset = [&](int64_t t, int64_t d) { return VecKOffset(t, d, s.block_tokens); };
  PackRange<uint16_t>(plain, s.token_stride_bytes, packed, {0, tokens}, {dims, s.head_dim}, offset);
  PackRange<uint16_t>(plain, s.token_stride_bytes, packed, {tokens, s.block_tokens},
                      {0, s.head_dim}, offset);
}

TARGET_AVX2 inline void StreamStep(const char* from, char* to) {
  for (int64_t byte = 0; byte < kStreamStepBytes; byte += kLineBytes) {
    StoreLine<true>(to + byte, Load(from + byte), Load(from + byte + 32));
  }
}

}  // namespace

TARGET_AVX2 void StreamCopies(const CopyJob* jobs, int64_t num_jobs, int64_t num_bytes) {
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
    kernels = {RunPackJobs<PackAmxK<uint16_t>>, RunPackJobs<PackAmxV16>,
               RunJobs<UnpackAmxK<uint16_t>>, RunJobs<UnpackAmxV16>};
  } else if (layout == PackedLayout::kAmx && element_bytes == 4) {
    kernels.pack_k = RunPackJobs<PackAmxK<uint32_t>>;
    kernels.unpack_k = RunJobs<UnpackAmxK<uint32_t>>;
  } else if (layout == PackedLayout::kVec && element_bytes == 2) {
    kernels.pack_k = ForJobs<PackVecK16>;
    kernels.unpack_k = ForJobs<UnpackVecK16>;
  } else if (layout == PackedLayout::kVec && element_bytes == 4) {
    kernels.pack_k = ForJobs<PackVecK32>;
    kernels.unpack_k = ForJobs<UnpackVecK32>;
  }
  return kernels;
}

}  // namespace blockcompact::avx2
#endif  // __x86_64__
