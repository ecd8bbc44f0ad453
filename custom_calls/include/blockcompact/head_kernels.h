// Packing and unpacking of one KV head of one block, and the implementations of it.
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
};

// Packs all block_tokens tokens.
using PackHead = void (*)(const void* plain, void* packed, const HeadShape& shape);
// Writes the first `num_tokens` token rows and nothing else.
using UnpackHead = void (*)(const void* packed, void* plain, const HeadShape& shape,
                            int64_t num_tokens);

struct HeadKernels {
  PackHead pack_k = nullptr;
  PackHead pack_v = nullptr;
  UnpackHead unpack_k = nullptr;
  UnpackHead unpack_v = nullptr;
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
