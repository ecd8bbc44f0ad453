#include "blockcompact/streaming.h"

#include <unistd.h>

#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace blockcompact {
namespace {

constexpr int64_t kNotForced = -1;
std::atomic<int64_t> forced_bytes{kNotForced};

// From about twice a second-level cache on, streaming was faster even where the result was read at
// once.
constexpr int64_t kDefaultBytes = int64_t{4} << 20;

}  // namespace

bool PaysToStream(int64_t num_bytes) {
  const int64_t forced = forced_bytes.load(std::memory_order_relaxed);
  return num_bytes >= (forced == kNotForced ? kDefaultBytes : forced);
}

void ForceStreamingFrom(int64_t num_bytes) {
  forced_bytes.store(num_bytes < 0 ? kNotForced : num_bytes, std::memory_order_relaxed);
}

void FenceStores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

CopyStreams CopyStreamsFor(int64_t num_bytes) {
#if defined(__x86_64__)
  if (!PaysToStream(num_bytes)) return nullptr;
  if (ChosenImpl() == Impl::kAvx512) return avx512::StreamCopies;
  if (ChosenImpl() == Impl::kAvx2) return avx2::StreamCopies;
#else
  static_cast<void>(num_bytes);
#endif
  return nullptr;
}

}  // namespace blockcompact
