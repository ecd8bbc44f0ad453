// Where blocks lie in memory. Views own nothing; offsets are 64-bit bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "blockcompact/layout.h"

namespace blockcompact {

// Byte distances of a plain KV region. The last dimension (head_dim) is contiguous.
struct PlainStrides {
  int64_t kv_bytes = 0;
  int64_t block_bytes = 0;
  int64_t head_bytes = 0;
  int64_t token_bytes = 0;
};

// Plain K and V of `num_blocks` blocks in each layer.
struct PlainView {
  std::vector<std::byte*> layer_bases;
  int64_t num_blocks = 0;
  BlockShape shape;
  PlainStrides strides;

  int64_t num_layers() const { return static_cast<int64_t>(layer_bases.size()); }
  std::byte* block(int64_t layer, int64_t block) const {
    return layer_bases[static_cast<size_t>(layer)] + block * strides.block_bytes;
  }
  std::byte* head(int64_t layer, int64_t block_number, int64_t kv, int64_t head_number) const {
    return block(layer, block_number) + kv * strides.kv_bytes + head_number * strides.head_bytes;
  }
};

// Packed rows [heads, 2 * block_tokens, head_dim], each contiguous.
struct PackedView {
  std::vector<std::byte*> layer_bases;
  int64_t num_blocks = 0;
  BlockShape shape;
  PackedLayout layout = PackedLayout::kVec;
  int64_t block_bytes = 0;  // distance of two rows

  int64_t num_layers() const { return static_cast<int64_t>(layer_bases.size()); }
  std::byte* block(int64_t layer, int64_t block) const {
    return layer_bases[static_cast<size_t>(layer)] + block * block_bytes;
  }
  std::byte* head(int64_t layer, int64_t block_number, int64_t kv, int64_t head_number) const {
    return block(layer, block_number) + (2 * head_number + kv) * shape.region_bytes();
  }
};

}  // namespace blockcompact
