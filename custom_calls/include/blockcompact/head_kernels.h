// Packing and unpacking of single KV heads of single blocks, and the implementations of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "blockcompact/layout.h"

namespace blockcompact {

// Token rows of one head: `token_stride_bytes` apart, each head_dim contiguous elements.
struct HeadShape {
  int64_t block_tokens;
  int64_t head_dim;
  int64_t token_stride_bytes;
  // The destination is larger than the caches: write past them where it is aligned. Whoever asks
  // for this calls FenceStores before others may read.
  bool is_streaming = false;
};

// K or V of one head of one block.
struct HeadJob {
  const void* from;
  void* to;
  int64_t num_tokens;     // unpacking writes these first token rows and nothing else
  const void* next_from;  // read soon after this one; null: nothing
};

// Jobs that a kernel works on in turns: memory serves several streams better than one.
inline constexpr int64_t kMaxHeadJobs = 4;

// At most kMaxHeadJobs jobs. Packing always packs all block_tokens tokens.
using HeadKernel = void (*)(const HeadJob* jobs, int64_t num_jobs, const HeadShape& shape);

struct HeadKernels {
  HeadKernel pack_k = nullptr;
  HeadKernel pack_v = nullptr;
  HeadKernel unpack_k = nullptr;
  HeadKernel unpack_v = nullptr;
};

// In ascending order of preference.
enum class Impl : int32_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

const char* ImplName(Impl impl);
std::vector<Impl> CompiledImpls();
std::vector<Impl> AvailableImpls();

// The implementation in use: the forced one, else BLOCKCOMPACT_FORCE_IMPL, else the best available.
// Throws std::invalid_argument with a sentence where a name is unknown or unavailable here.
Impl ChosenImpl();

// Forces an implementation for this process; "" returns to the default. Throws as ChosenImpl does.
void ForceImpl(const std::string& name);

// Kernels for a supported (layout, element size). An implementation without a fast path for one
// of the four jobs serves the scalar kernel there.
HeadKernels SelectHeadKernels(Impl impl, PackedLayout layout, int64_t element_bytes);

namespace scalar {
HeadKernels Kernels(PackedLayout layout, int64_t element_bytes);
}
#if defined(__x86_64__)
namespace avx2 {
HeadKernels Kernels(PackedLayout layout, int64_t element_bytes);
}
namespace avx512 {
HeadKernels Kernels(PackedLayout layout, int64_t element_bytes);
}
#endif

}  // namespace blockcompact
