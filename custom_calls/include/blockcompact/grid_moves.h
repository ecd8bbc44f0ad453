// Byte movement on a grid: what one thread does, (row, lane) by (row, lane). Threads are
// independent within a launch. The CUDA kernels are these bodies; the host tests run the same ones.
#pragma once

#include <cstdint>

#include "blockcompact/grid_memory.h"
#include "blockcompact/grid_rows.h"
#include "blockcompact/host_device.h"
#include "blockcompact/layout.h"
#include "blockcompact/views.h"

namespace blockcompact {

// Views in 64-bit bytes. Layers lie at equal distances of `layer_bytes`, or each at its own of the
// `layer_offsets`, whose bits `layer_bytes` then joins: it says what divides them all.
struct GridPlain {
  std::byte* base = nullptr;
  int64_t layer_bytes = 0;
  PlainStrides strides;
  const int64_t* layer_offsets = nullptr;

  BLOCKCOMPACT_HOST_DEVICE std::byte* token(int64_t layer, int64_t block, int64_t kv, int64_t head,
                                            int64_t token) const {
    const int64_t offset = layer_offsets == nullptr ? layer * layer_bytes : layer_offsets[layer];
    return base + offset + block * strides.block_bytes + kv * strides.kv_bytes +
           head * strides.head_bytes + token * strides.token_bytes;
  }
};

struct GridPacked {
  std::byte* base = nullptr;
  int64_t layer_bytes = 0;
  int64_t block_bytes = 0;
  const int64_t* layer_offsets = nullptr;

  BLOCKCOMPACT_HOST_DEVICE std::byte* block(int64_t layer, int64_t block) const {
    const int64_t offset = layer_offsets == nullptr ? layer * layer_bytes : layer_offsets[layer];
    return base + offset + block * block_bytes;
  }
};

// kNum elements that follow each other in a packed region, as plain data: kNumTokens tokens, the
// first one's place and on, of kNumDims contiguous dims each.
template <PackedLayout kLayout, bool kIsV, typename T, int kNum>
struct ChunkOrder {
  static constexpr bool kIsAmx = kLayout == PackedLayout::kAmx;
  static constexpr int kPair = static_cast<int>(PairElements(sizeof(T)));
  static constexpr int kPairs = kNum < kPair ? 1 : kNum / kPair;
  static constexpr int kInPair = kNum < kPair ? kNum : kPair;
  static constexpr int kNumTokens = kIsAmx ? (kIsV ? kInPair : kPairs) : (kIsV ? 1 : kNum);
  static constexpr int kNumDims = kNum / kNumTokens;

  BLOCKCOMPACT_HOST_DEVICE static constexpr int Element(int token, int dim) {
    return kIsAmx && kIsV ? dim * kInPair + token : token * kNumDims + dim;
  }

  BLOCKCOMPACT_HOST_DEVICE static BlockPlace First(int64_t offset, const BlockShape& shape) {
    if (kIsAmx) {
      return kIsV ? AmxVPlace(offset, shape.block_tokens, kPair)
                  : AmxKPlace(offset, shape.head_dim, kPair);
    }
    return kIsV ? VecVPlace(offset, shape.head_dim) : VecKPlace(offset, shape.block_tokens);
  }
};

// Where a lane of a packed row stands: lanes count chunks of kNum elements through the row.
struct LanePlace {
  uint32_t head;
  uint32_t kv;
  uint32_t offset;  // elements, in the region
};

template <int kNum>
BLOCKCOMPACT_HOST_DEVICE LanePlace PlaceOfLane(uint32_t lane, const BlockShape& shape) {
  const uint32_t lanes_per_region =
      static_cast<uint32_t>(shape.block_tokens) * static_cast<uint32_t>(shape.head_dim) / kNum;
  const uint32_t region = lane / lanes_per_region;
  return {region / 2, region % 2, (lane - region * lanes_per_region) * kNum};
}

// What a lane of a packed row does, unless its row is refused or padding: body.Move of K or of V.
template <int kNum, typename Body>
BLOCKCOMPACT_HOST_DEVICE void MoveInRegion(const Body& body, int64_t row, uint32_t lane) {
  if (body.grid.is_refused() || body.grid.is_hole(row)) return;
  const LanePlace place = PlaceOfLane<kNum>(lane, body.shape);
  if (place.kv == 0) {
    body.template Move<false>(row, lane, place);
  } else {
    body.template Move<true>(row, lane, place);
  }
}

// Packed rows into plain blocks, the first valid tokens. Neighbouring threads read neighbouring
// chunks: a packed row in host memory crosses the bus once, in order.
template <PackedLayout kLayout, typename T, int kNum>
struct UnpackBody {
  GridPacked from;
  GridPlain to;
  BlockShape shape;
  GridRows grid;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t lane) const {
    MoveInRegion<kNum>(*this, row, lane);
  }

  template <bool kIsV>
  BLOCKCOMPACT_HOST_DEVICE void Move(int64_t row, uint32_t lane, const LanePlace& place) const {
    using Order = ChunkOrder<kLayout, kIsV, T, kNum>;
    const BlockPlace first = Order::First(place.offset, shape);
    const int64_t num_valid = grid.valid_tokens_of(row);
    if (first.token >= num_valid) return;
    const int64_t layer = grid.layer_of(row);
    const std::byte* source = from.block(layer, grid.from_block_of(row));
    const Run<T, kNum> chunk = LoadRun<T, kNum>(source + int64_t{lane} * kNum * sizeof(T));
    std::byte* target = to.token(layer, grid.to_block_of(row), place.kv, place.head, first.token) +
                        first.dim * sizeof(T);
    BLOCKCOMPACT_UNROLL
    for (int token = 0; token < Order::kNumTokens; ++token) {
      if (first.token + token >= num_valid) break;
      Run<T, Order::kNumDims> dims;
      BLOCKCOMPACT_UNROLL
      for (int dim = 0; dim < Order::kNumDims; ++dim) {
        dims.elements[dim] = chunk.elements[Order::Element(token, dim)];
      }
      StoreRun(target + token * to.strides.token_bytes, dims);
    }
  }
};

// Plain blocks into packed rows, all tokens; the mirror of UnpackBody.
template <PackedLayout kLayout, typename T, int kNum>
struct PackBody {
  GridPlain from;
  GridPacked to;
  BlockShape shape;
  GridRows grid;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t lane) const {
    MoveInRegion<kNum>(*this, row, lane);
  }

  template <bool kIsV>
  BLOCKCOMPACT_HOST_DEVICE void Move(int64_t row, uint32_t lane, const LanePlace& place) const {
    using Order = ChunkOrder<kLayout, kIsV, T, kNum>;
    const BlockPlace first = Order::First(place.offset, shape);
    const int64_t layer = grid.layer_of(row);
    const std::byte* source =
        from.token(layer, grid.from_block_of(row), place.kv, place.head, first.token) +
        first.dim * sizeof(T);
    Run<T, kNum> chunk;
    BLOCKCOMPACT_UNROLL
    for (int token = 0; token < Order::kNumTokens; ++token) {
      const auto dims = LoadRun<T, Order::kNumDims>(source + token * from.strides.token_bytes);
      BLOCKCOMPACT_UNROLL
      for (int dim = 0; dim < Order::kNumDims; ++dim) {
        chunk.elements[Order::Element(token, dim)] = dims.elements[dim];
      }
    }
    StoreRun(to.block(layer, grid.to_block_of(row)) + int64_t{lane} * kNum * sizeof(T), chunk);
  }
};

// Plain blocks to plain blocks. Where rows name no destination it is their own number in layer 0,
// and padding and refused calls give zeros there; else both leave everything as it is.
template <int kBytes>
struct GatherBody {
  GridPlain from;
  GridPlain to;
  BlockShape shape;
  GridRows grid;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t lane) const {
    const uint32_t lanes_per_token = static_cast<uint32_t>(shape.token_bytes() / kBytes);
    const uint32_t tokens = static_cast<uint32_t>(shape.block_tokens);
    const uint32_t token_number = lane / lanes_per_token;
    const int64_t offset = int64_t{lane - token_number * lanes_per_token} * kBytes;
    const uint32_t region = token_number / tokens;
    const uint32_t token = token_number - region * tokens;
    const bool is_moved = !grid.is_refused() && !grid.is_hole(row);
    const bool has_destination = grid.rows.to_block != nullptr;
    if (!is_moved && has_destination) return;
    Run<uint8_t, kBytes> bytes = {};
    if (is_moved) {
      const std::byte* source =
          from.token(grid.layer_of(row), grid.from_block_of(row), region % 2, region / 2, token);
      bytes = LoadRun<uint8_t, kBytes>(source + offset);
    }
    const int64_t layer = has_destination ? grid.layer_of(row) : 0;
    StoreRun(to.token(layer, grid.to_block_of(row), region % 2, region / 2, token) + offset, bytes);
  }
};

// Blocks of contiguous bytes moved within one pool, as if all were read before any is written: the
// first launch saves the blocks that some row overwrites, the second one writes.
struct GridMove {
  std::byte* pool = nullptr;
  std::byte* saved = nullptr;  // [num_rows, block_bytes]
  int64_t block_bytes = 0;
  GridRows grid;  // with `owner`, as the row checks left it

  BLOCKCOMPACT_HOST_DEVICE std::byte* block(int64_t row, int64_t block_number) const {
    const int64_t cell = grid.layer_of(row) * grid.limits.num_to_blocks + block_number;
    return pool + cell * block_bytes;
  }
  BLOCKCOMPACT_HOST_DEVICE bool moves(int64_t row) const {
    return !grid.is_refused() && !grid.is_hole(row) &&
           grid.from_block_of(row) != grid.to_block_of(row);
  }
  BLOCKCOMPACT_HOST_DEVICE bool is_source_overwritten(int64_t row) const {
    return *grid.owner_of(grid.layer_of(row), grid.from_block_of(row)) != kNoOwner;
  }
};

template <int kBytes>
struct SaveBlockBody {
  GridMove move;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t lane) const {
    if (!move.moves(row) || !move.is_source_overwritten(row)) return;
    const int64_t offset = int64_t{lane} * kBytes;
    StoreRun(move.saved + row * move.block_bytes + offset,
             LoadRun<uint8_t, kBytes>(move.block(row, move.grid.from_block_of(row)) + offset));
  }
};

template <int kBytes>
struct WriteBlockBody {
  GridMove move;

  BLOCKCOMPACT_HOST_DEVICE void operator()(int64_t row, uint32_t lane) const {
    if (!move.moves(row)) return;
    const std::byte* source = move.is_source_overwritten(row)
                                  ? move.saved + row * move.block_bytes
                                  : move.block(row, move.grid.from_block_of(row));
    const int64_t offset = int64_t{lane} * kBytes;
    StoreRun(move.block(row, move.grid.to_block_of(row)) + offset,
             LoadRun<uint8_t, kBytes>(source + offset));
  }
};

}  // namespace blockcompact
