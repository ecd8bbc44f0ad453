// Block shapes and the element order inside one packed head region.
#pragma once

#include <cstdint>
#include <string>

#include "blockcompact/host_device.h"

namespace blockcompact {

// Mirrored by `Layout` in blockcompact_jax/kernels/layouts.py.
enum class PackedLayout : int32_t { kAmx = 0, kVec = 1 };

// One block of one layer. Counts are elements unless the name says bytes.
struct BlockShape {
  int64_t num_heads = 0;
  int64_t block_tokens = 0;
  int64_t head_dim = 0;
  int64_t element_bytes = 0;

  BLOCKCOMPACT_HOST_DEVICE int64_t region_bytes() const {
    return block_tokens * head_dim * element_bytes;
  }  // K or V
  BLOCKCOMPACT_HOST_DEVICE int64_t packed_row_bytes() const {
    return num_heads * 2 * region_bytes();
  }
  BLOCKCOMPACT_HOST_DEVICE int64_t token_bytes() const { return head_dim * element_bytes; }

  bool operator==(const BlockShape& other) const {
    return num_heads == other.num_heads && block_tokens == other.block_tokens &&
           head_dim == other.head_dim && element_bytes == other.element_bytes;
  }
  bool operator!=(const BlockShape& other) const { return !(*this == other); }
};

// Elements a VNNI pair joins: 2 for 16-bit types, 1 for 32-bit ones.
BLOCKCOMPACT_HOST_DEVICE inline constexpr int64_t PairElements(int64_t element_bytes) {
  return element_bytes == 2 ? 2 : 1;
}

inline constexpr int64_t kAmxTile = 16;

BLOCKCOMPACT_HOST_DEVICE inline constexpr int64_t AmxKOffset(int64_t token, int64_t dim,
                                                             int64_t head_dim, int64_t pair) {
  return (token / kAmxTile) * kAmxTile * head_dim + (dim / pair) * kAmxTile * pair +
         (token % kAmxTile) * pair + dim % pair;
}

BLOCKCOMPACT_HOST_DEVICE inline constexpr int64_t AmxVOffset(int64_t token, int64_t dim,
                                                             int64_t block_tokens, int64_t pair) {
  return (dim / kAmxTile) * block_tokens * kAmxTile + (token / pair) * kAmxTile * pair +
         (dim % kAmxTile) * pair + token % pair;
}

BLOCKCOMPACT_HOST_DEVICE inline constexpr int64_t VecKOffset(int64_t token, int64_t dim,
                                                             int64_t block_tokens) {
  return dim * block_tokens + token;
}

BLOCKCOMPACT_HOST_DEVICE inline constexpr int64_t VecVOffset(int64_t token, int64_t dim,
                                                             int64_t head_dim) {
  return token * head_dim + dim;
}

// A token of a block and a dim of its head.
struct BlockPlace {
  int64_t token;
  int64_t dim;
};

// The inverses: what stands at an offset of a region.
BLOCKCOMPACT_HOST_DEVICE inline constexpr BlockPlace AmxKPlace(int64_t offset, int64_t head_dim,
                                                               int64_t pair) {
  const int64_t tile = offset / (kAmxTile * head_dim);
  const int64_t in_tile = offset % (kAmxTile * head_dim);
  const int64_t in_line = in_tile % (kAmxTile * pair);
  return {tile * kAmxTile + in_line / pair, in_tile / (kAmxTile * pair) * pair + in_line % pair};
}

BLOCKCOMPACT_HOST_DEVICE inline constexpr BlockPlace AmxVPlace(int64_t offset, int64_t block_tokens,
                                                               int64_t pair) {
  const int64_t chunk = offset / (block_tokens * kAmxTile);
  const int64_t in_chunk = offset % (block_tokens * kAmxTile);
  const int64_t in_line = in_chunk % (kAmxTile * pair);
  return {in_chunk / (kAmxTile * pair) * pair + in_line % pair, chunk * kAmxTile + in_line / pair};
}

BLOCKCOMPACT_HOST_DEVICE inline constexpr BlockPlace VecKPlace(int64_t offset,
                                                               int64_t block_tokens) {
  return {offset % block_tokens, offset / block_tokens};
}

BLOCKCOMPACT_HOST_DEVICE inline constexpr BlockPlace VecVPlace(int64_t offset, int64_t head_dim) {
  return {offset / head_dim, offset % head_dim};
}

// Why `shape` cannot be stored plainly, or "" where it can.
std::string PlainShapeProblem(const BlockShape& shape);

// Why `layout` cannot hold `shape`, or "" where it can.
std::string PackedShapeProblem(PackedLayout layout, const BlockShape& shape);

}  // namespace blockcompact
