// The packing half of the AVX-512 head kernels.
#pragma once

#include <cstdint>

#include "blockcompact/head_kernels.h"

namespace blockcompact::avx512 {

// Sets pack_k and pack_v where there is a fast path.
void AddPackKernels(PackedLayout layout, int64_t element_bytes, HeadKernels* kernels);

}  // namespace blockcompact::avx512
