// Which body moves which blocks, by layout, element size and alignment. `launch(body, num_rows,
// num_lanes)` runs a body for every row and lane and returns 0 (as its error type) where it could:
// on the device it starts a kernel, in the host tests it loops.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blockcompact/grid_moves.h"

namespace blockcompact {

// Every byte distance and address of a call, joined bit by bit: its low bits say what divides all.
class AlignmentBits {
 public:
  AlignmentBits& Add(int64_t distance_bytes) {
    bits_ |= static_cast<uint64_t>(distance_bytes);
    return *this;
  }
  AlignmentBits& Add(const GridPlain& view) {
    Add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.base))).Add(view.layer_bytes);
    Add(view.strides.kv_bytes).Add(view.strides.block_bytes);
    return Add(view.strides.head_bytes).Add(view.strides.token_bytes);
  }
  AlignmentBits& Add(const GridPacked& view) {
    Add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.base)));
    return Add(view.layer_bytes).Add(view.block_bytes);
  }
  bool IsMultipleOf(int num_bytes) const { return bits_ % static_cast<uint64_t>(num_bytes) == 0; }

 private:
  uint64_t bits_ = 0;
};

// Whether threads may take whole 16-byte chunks: aligned on both sides, and no chunk of a packed
// region goes past the end of what it is contiguous in.
inline bool HasWholeChunks(PackedLayout layout, const BlockShape& shape, const GridPacked& packed,
                           const GridPlain& plain) {
  AlignmentBits bits;
  bits.Add(packed).Add(plain).Add(shape.token_bytes());
  if (layout == PackedLayout::kVec) bits.Add(shape.block_tokens * shape.element_bytes);
  return bits.IsMultipleOf(kGridChunkBytes);
}

template <template <PackedLayout, typename, int> class Body, PackedLayout kLayout, typename T,
          typename From, typename To, typename Launch>
auto LaunchPackedOf(bool has_chunks, const From& from, const To& to, const BlockShape& shape,
                    const GridRows& grid, const Launch& launch) {
  constexpr int kChunk = kGridChunkBytes / static_cast<int>(sizeof(T));
  const int64_t num_elements = shape.packed_row_bytes() / static_cast<int64_t>(sizeof(T));
  const int64_t num_rows = grid.rows.num_rows;
  if (has_chunks) {
    return launch(Body<kLayout, T, kChunk>{from, to, shape, grid}, num_rows, num_elements / kChunk);
  }
  return launch(Body<kLayout, T, 1>{from, to, shape, grid}, num_rows, num_elements);
}

// Expects a layout that can hold the shape.
template <template <PackedLayout, typename, int> class Body, typename From, typename To,
          typename Launch>
auto LaunchPacked(PackedLayout layout, bool has_chunks, const From& from, const To& to,
                  const BlockShape& shape, const GridRows& grid, const Launch& launch) {
  constexpr PackedLayout kAmx = PackedLayout::kAmx, kVec = PackedLayout::kVec;
  const bool is_amx = layout == kAmx;
  switch (shape.element_bytes) {
    case 1:
      return LaunchPackedOf<Body, kVec, uint8_t>(has_chunks, from, to, shape, grid, launch);
    case 2:
      return is_amx
                 ? LaunchPackedOf<Body, kAmx, uint16_t>(has_chunks, from, to, shape, grid, launch)
                 : LaunchPackedOf<Body, kVec, uint16_t>(has_chunks, from, to, shape, grid, launch);
    default:
      return is_amx
                 ? LaunchPackedOf<Body, kAmx, uint32_t>(has_chunks, from, to, shape, grid, launch)
                 : LaunchPackedOf<Body, kVec, uint32_t>(has_chunks, from, to, shape, grid, launch);
  }
}

template <typename Launch>
auto LaunchUnpack(PackedLayout layout, const GridPacked& from, const GridPlain& to,
                  const BlockShape& shape, const GridRows& grid, const Launch& launch) {
  const bool has_chunks = HasWholeChunks(layout, shape, from, to);
  return LaunchPacked<UnpackBody>(layout, has_chunks, from, to, shape, grid, launch);
}

template <typename Launch>
auto LaunchPack(PackedLayout layout, const GridPlain& from, const GridPacked& to,
                const BlockShape& shape, const GridRows& grid, const Launch& launch) {
  const bool has_chunks = HasWholeChunks(layout, shape, to, from);
  return LaunchPacked<PackBody>(layout, has_chunks, from, to, shape, grid, launch);
}

// Calls `function` with the widest access, as a constant, that divides everything in `bits`.
template <typename Function>
auto WithWidestAccess(const AlignmentBits& bits, const Function& function) {
  if (bits.IsMultipleOf(16)) return function(std::integral_constant<int, 16>{});
  if (bits.IsMultipleOf(8)) return function(std::integral_constant<int, 8>{});
  if (bits.IsMultipleOf(4)) return function(std::integral_constant<int, 4>{});
  if (bits.IsMultipleOf(2)) return function(std::integral_constant<int, 2>{});
  return function(std::integral_constant<int, 1>{});
}

template <typename Launch>
auto LaunchGather(const GridPlain& from, const GridPlain& to, const BlockShape& shape,
                  const GridRows& grid, const Launch& launch) {
  AlignmentBits bits;
  bits.Add(from).Add(to).Add(shape.token_bytes());
  return WithWidestAccess(bits, [&](auto width) {
    constexpr int kBytes = decltype(width)::value;
    return launch(GatherBody<kBytes>{from, to, shape, grid}, grid.rows.num_rows,
                  shape.packed_row_bytes() / kBytes);
  });
}

template <typename Launch>
auto LaunchMove(const GridMove& move, const Launch& launch) {
  AlignmentBits bits;
  bits.Add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(move.pool)));
  bits.Add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(move.saved))).Add(move.block_bytes);
  return WithWidestAccess(bits, [&](auto width) {
    constexpr int kBytes = decltype(width)::value;
    const int64_t num_rows = move.grid.rows.num_rows;
    const int64_t num_lanes = move.block_bytes / kBytes;
    auto error = launch(SaveBlockBody<kBytes>{move}, num_rows, num_lanes);
    if (error == decltype(error){}) {
      error = launch(WriteBlockBody<kBytes>{move}, num_rows, num_lanes);
    }
    return error;
  });
}

}  // namespace blockcompact
