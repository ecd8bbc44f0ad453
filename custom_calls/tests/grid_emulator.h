// Runs grid bodies on the host, thread by thread in random order, and counts their stores.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

inline void OnStore(const std::byte* address, int num_bytes);
#define BLOCKCOMPACT_ON_STORE(address, num_bytes) OnStore(address, num_bytes)

// All headers with bodies: they see the definition above where nothing includes them before.
#include "blockcompact/emulated_device.h"
#include "blockcompact/grid_attend.h"
#include "blockcompact/grid_dispatch.h"
#include "blockcompact/rows.h"
#include "check.h"

using namespace blockcompact;  // NOLINT: part of a test program

using Bytes = std::vector<uint8_t>;

// Stores into `begin` ... and how often each byte was stored; other stores are not counted.
inline const std::byte* watched_begin = nullptr;
inline Bytes store_counts;
inline int widest_store = 0;

inline void Watch(const Bytes& bytes) {
  watched_begin = reinterpret_cast<const std::byte*>(bytes.data());
  store_counts.assign(bytes.size(), 0);
  widest_store = 0;
}

inline std::mt19937 shuffle_random(1);

// Runs each (row, lane) once, in random order.
struct Emulator {
  template <typename Body>
  int operator()(const Body& body, int64_t num_rows, int64_t num_lanes) const {
    std::vector<int64_t> threads(static_cast<size_t>(num_rows * num_lanes));
    std::iota(threads.begin(), threads.end(), int64_t{0});
    std::shuffle(threads.begin(), threads.end(), shuffle_random);
    for (int64_t thread : threads) {
      body(thread / num_lanes, static_cast<uint32_t>(thread % num_lanes));
    }
    return 0;
  }
};

inline std::byte* Data(Bytes& bytes, int64_t offset = 0) {
  return reinterpret_cast<std::byte*>(bytes.data()) + offset;
}

// A grid call with its own fault and owners, checked as on the device.
struct Call {
  GridFault fault = kNoGridFault;
  std::vector<int32_t> owner;
  GridRows grid;

  Call(const Rows& rows, const RowLimits& limits) {
    grid = {rows, limits, &fault, nullptr};
    if (rows.to_block != nullptr) {
      owner.assign(static_cast<size_t>(limits.num_layers * limits.num_to_blocks), kNoOwner);
      grid.owner = owner.data();
    }
    CHECK(LaunchRowChecks(grid, Emulator{}) == 0, "row checks");
  }
  Call(const Call&) = delete;

  Status status() {
    int32_t values[2] = {-7, -7};
    Emulator{}(WriteStatusBody{&fault, values}, 1, 1);
    return {static_cast<StatusCode>(values[0]), values[1]};
  }
};

// Plain memory of [layers, blocks, ...] with gaps, its view for both sides, and a guard in front.
struct PlainMemory {
  Bytes bytes;
  PlainView view;
  GridPlain grid;

  PlainMemory(const BlockShape& shape, int64_t num_layers, int64_t num_blocks, bool is_nhd,
              int64_t token_gap_bytes, int64_t base_offset_bytes, uint32_t seed) {
    PlainStrides s;
    const int64_t token = shape.token_bytes() + token_gap_bytes;
    s.token_bytes = is_nhd ? token * shape.num_heads : token;
    s.head_bytes = is_nhd ? token : token * shape.block_tokens;
    s.kv_bytes = token * shape.num_heads * shape.block_tokens;
    s.block_bytes = 2 * s.kv_bytes;
    const int64_t layer_bytes = num_blocks * s.block_bytes;
    bytes = RandomBytes(base_offset_bytes + num_layers * layer_bytes + 64, seed);
    view = {{}, num_blocks, shape, s};
    const int64_t skew = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(bytes.data())) & 15;
    std::byte* base = Data(bytes, skew + base_offset_bytes);
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      view.layer_bases.push_back(base + layer * layer_bytes);
    }
    grid = {base, layer_bytes, s};
  }
  PlainMemory(const PlainMemory&) = delete;
};

struct PackedMemory {
  Bytes bytes;
  PackedView view;
  GridPacked grid;

  PackedMemory(const BlockShape& shape, PackedLayout layout, int64_t num_layers, int64_t num_blocks,
               uint32_t seed) {
    const int64_t row_bytes = shape.packed_row_bytes();
    bytes = RandomBytes(num_layers * num_blocks * row_bytes + 16, seed);
    const int64_t skew = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(bytes.data())) & 15;
    view = {{}, num_blocks, shape, layout, row_bytes};
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      view.layer_bases.push_back(Data(bytes, skew + layer * num_blocks * row_bytes));
    }
    grid = {Data(bytes, skew), num_blocks * row_bytes, row_bytes};
  }
  PackedMemory(const PackedMemory&) = delete;
};

inline void OnStore(const std::byte* address, int num_bytes) {
  const std::ptrdiff_t at = address - watched_begin;
  if (watched_begin == nullptr || at < 0 ||
      at >= static_cast<std::ptrdiff_t>(store_counts.size())) {
    return;
  }
  widest_store = std::max(widest_store, num_bytes);
  for (int i = 0; i < num_bytes; ++i) ++store_counts[static_cast<size_t>(at + i)];
}
