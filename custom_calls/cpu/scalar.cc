#include "scalar.h"

#include "blockcompact/head_kernels.h"

namespace blockcompact::scalar {
namespace {

template <typename T>
struct AmxK {
  static auto Offset(const HeadShape& s) {
    return [d_all = s.head_dim](int64_t t, int64_t d) {
      return AmxKOffset(t, d, d_all, PairElements(sizeof(T)));
    };
  }
};

template <typename T>
struct AmxV {
  static auto Offset(const HeadShape& s) {
    return [b = s.block_tokens](int64_t t, int64_t d) {
      return AmxVOffset(t, d, b, PairElements(sizeof(T)));
    };
  }
};

template <typename T>
struct VecK {
  static auto Offset(const HeadShape& s) {
    return [b = s.block_tokens](int64_t t, int64_t d) { return VecKOffset(t, d, b); };
  }
};

template <typename T, template <typename> class Order>
void Pack(const void* plain, void* packed, const HeadShape& s, int64_t) {
  PackRange<T>(plain, s.token_stride_bytes, packed, {0, s.block_tokens}, {0, s.head_dim},
               Order<T>::Offset(s));
}

template <typename T, template <typename> class Order>
void Unpack(const void* packed, void* plain, const HeadShape& s, int64_t num_tokens) {
  UnpackRange<T>(packed, plain, s.token_stride_bytes, {0, num_tokens}, {0, s.head_dim},
                 Order<T>::Offset(s));
}

// The V region of `vec` is plain token rows.
template <typename T>
void PackVecV(const void* plain, void* packed, const HeadShape& s, int64_t) {
  const size_t row_bytes = static_cast<size_t>(s.head_dim) * sizeof(T);
  for (int64_t t = 0; t < s.block_tokens; ++t) {
    std::memcpy(static_cast<char*>(packed) + t * static_cast<int64_t>(row_bytes),
                static_cast<const char*>(plain) + t * s.token_stride_bytes, row_bytes);
  }
}

template <typename T>
void UnpackVecV(const void* packed, void* plain, const HeadShape& s, int64_t num_tokens) {
  const size_t row_bytes = static_cast<size_t>(s.head_dim) * sizeof(T);
  if (s.token_stride_bytes == static_cast<int64_t>(row_bytes)) {
    std::memcpy(plain, packed, static_cast<size_t>(num_tokens) * row_bytes);
    return;
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::memcpy(static_cast<char*>(plain) + t * s.token_stride_bytes,
                static_cast<const char*>(packed) + t * static_cast<int64_t>(row_bytes), row_bytes);
  }
}

// The V region of 32-bit `amx` is plain runs of 16 dims.
void PackAmxV32(const void* plain, void* packed, const HeadShape& s, int64_t) {
  for (int64_t t = 0; t < s.block_tokens; ++t) {
    const char* row = static_cast<const char*>(plain) + t * s.token_stride_bytes;
    for (int64_t d = 0; d < s.head_dim; d += kAmxTile) {
      std::memcpy(static_cast<char*>(packed) + 4 * AmxVOffset(t, d, s.block_tokens, 1), row + 4 * d,
                  4 * kAmxTile);
    }
  }
}

void UnpackAmxV32(const void* packed, void* plain, const HeadShape& s, int64_t num_tokens) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    char* row = static_cast<char*>(plain) + t * s.token_stride_bytes;
    for (int64_t d = 0; d < s.head_dim; d += kAmxTile) {
      std::memcpy(row + 4 * d,
                  static_cast<const char*>(packed) + 4 * AmxVOffset(t, d, s.block_tokens, 1),
                  4 * kAmxTile);
    }
  }
}

HeadKernels AmxKernels(int64_t element_bytes) {
  if (element_bytes == 2) {
    return {ForJobs<Pack<uint16_t, AmxK>>, ForJobs<Pack<uint16_t, AmxV>>,
            ForJobs<Unpack<uint16_t, AmxK>>, ForJobs<Unpack<uint16_t, AmxV>>};
  }
  return {ForJobs<Pack<uint32_t, AmxK>>, ForJobs<PackAmxV32>, ForJobs<Unpack<uint32_t, AmxK>>,
          ForJobs<UnpackAmxV32>};
}

template <typename T>
HeadKernels VecKernels() {
  return {ForJobs<Pack<T, VecK>>, ForJobs<PackVecV<T>>, ForJobs<Unpack<T, VecK>>,
          ForJobs<UnpackVecV<T>>};
}

}  // namespace

HeadKernels Kernels(PackedLayout layout, int64_t element_bytes) {
  if (layout == PackedLayout::kAmx) {
    return element_bytes == 1 ? HeadKernels{} : AmxKernels(element_bytes);
  }
  switch (element_bytes) {
    case 1:
      return VecKernels<uint8_t>();
    case 2:
      return VecKernels<uint16_t>();
    default:
      return VecKernels<uint32_t>();
  }
}

}  // namespace blockcompact::scalar
