// Stores that go past the caches: when they pay, and the copies made with them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blockcompact/head_kernels.h"

namespace blockcompact {

inline constexpr int64_t kLineBytes = 64;

inline bool IsLineAligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kLineBytes == 0;
}

// Whether a call that writes num_bytes in all writes past the caches.
bool PaysToStream(int64_t num_bytes);

// Overrides the size from which on it pays, for tests; negative returns to the default.
void ForceStreamingFrom(int64_t num_bytes);

// Orders streamed stores of this thread before its later ones.
void FenceStores();

// Contiguous bytes to copy.
struct CopyJob {
  const std::byte* from;
  std::byte* to;
};

inline constexpr int64_t kMaxCopyJobs = 4;

inline constexpr int64_t kStreamStepBytes =
    4 * kLineBytes;  // of one copy before the next has its turn

// At most kMaxCopyJobs copies of num_bytes each, a multiple of kStreamStepBytes, to aligned
// addresses. They are worked on in turns, at each offset in their order. Two regions must be equal
// or apart.
using CopyStreams = void (*)(const CopyJob* jobs, int64_t num_jobs, int64_t num_bytes);

// Null where the implementation has none, or where it does not pay for a call of num_bytes.
CopyStreams CopyStreamsFor(int64_t num_bytes);

#if defined(__x86_64__)
namespace avx2 {
void StreamCopies(const CopyJob* jobs, int64_t num_jobs, int64_t num_bytes);
}
namespace avx512 {
void StreamCopies(const CopyJob* jobs, int64_t num_jobs, int64_t num_bytes);
}
#endif

}  // namespace blockcompact
