// Portable kernels over a range of tokens and dims; SIMD kernels use them for what is left over.
#pragma once

#include <cstdint>
#include <cstring>

#include "blockcompact/head_kernels.h"
#include "blockcompact/layout.h"

namespace blockcompact::scalar {

struct Range {
  int64_t begin;
  int64_t end;
};

template <typename T>
T Load(const void* base, int64_t element) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + element * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Store(void* base, int64_t element, T value) {
  std::memcpy(static_cast<char*>(base) + element * sizeof(T), &value, sizeof(T));
}

// `offset(token, dim)` is the packed element offset.
template <typename T, typename Offset>
void PackRange(const void* plain, int64_t token_stride_bytes, void* packed, Range tokens,
               Range dims, Offset offset) {
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const char* row = static_cast<const char*>(plain) + t * token_stride_bytes;
    for (int64_t d = dims.begin; d < dims.end; ++d) {
      Store<T>(packed, offset(t, d), Load<T>(row, d));
    }
  }
}

template <typename T, typename Offset>
void UnpackRange(const void* packed, void* plain, int64_t token_stride_bytes, Range tokens,
                 Range dims, Offset offset) {
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    char* row = static_cast<char*>(plain) + t * token_stride_bytes;
    for (int64_t d = dims.begin; d < dims.end; ++d) {
      Store<T>(row, d, Load<T>(packed, offset(t, d)));
    }
  }
}

// A kernel of jobs out of a function for one head.
using OneHead = void (*)(const void* from, void* to, const HeadShape& shape, int64_t num_tokens);

template <OneHead kOneHead>
void ForJobs(const HeadJob* jobs, int64_t num_jobs, const HeadShape& shape) {
  for (int64_t i = 0; i < num_jobs; ++i) {
    kOneHead(jobs[i].from, jobs[i].to, shape, jobs[i].num_tokens);
  }
}

}  // namespace blockcompact::scalar
