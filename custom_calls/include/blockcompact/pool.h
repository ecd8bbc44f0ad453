// Registry of memory owned elsewhere: pools of an engine, CPU stores.
#pragma once

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <variant>
#include <vector>

#include "blockcompact/device_stream.h"
#include "blockcompact/layout.h"
#include "blockcompact/views.h"

namespace blockcompact {

// Bytes [begin, end) that a pool may touch.
struct MemorySpan {
  const std::byte* begin;
  const std::byte* end;
};

// A registered pool. The views and spans never change; `generation` counts accepted writes and is
// guarded by `mutex` (shared: readers of bytes and generation, exclusive: writers). Transfers that
// run beside their caller hold no mutex but keep their blocks open (open_transfers.h).
struct Pool {
  int64_t pool_id = 0;
  std::variant<PlainView, PackedView> view;
  std::vector<MemorySpan> spans;
  bool is_writable = true;
  std::shared_ptr<void> keepalive;
  DeviceStream stream{kHostDevice, nullptr};  // of the memory's device, that its owner works on
  std::shared_ptr<void> pinned;               // holds the memory pinned
  mutable std::shared_mutex mutex;
  uint32_t generation = 0;

  const PlainView* plain() const { return std::get_if<PlainView>(&view); }
  const PackedView* packed() const { return std::get_if<PackedView>(&view); }
  int32_t device() const { return stream.device; }
  bool is_on_device() const { return stream.device != kHostDevice; }
};

// Memory of one pool: one allocation with a layer stride, or one allocation for each layer.
struct PoolMemory {
  std::vector<std::byte*> allocations;  // 1, or num_layers
  int64_t size_bytes = 0;               // of each allocation
  int64_t num_layers = 0;
  int64_t layer_stride_bytes = 0;  // ignored with one allocation for each layer
  bool is_writable = true;
  std::shared_ptr<void> keepalive;
  DeviceStream stream{kHostDevice, nullptr};  // whose memory it is, and where its owner works on it
};

// Both check bounds, alignment and overlap of strides, and throw std::invalid_argument naming the
// argument. They return the pool ID, which is never used again after RemovePool.
int64_t AddPlainPool(const PoolMemory& memory, int64_t num_blocks, const BlockShape& shape,
                     const PlainStrides& strides);
int64_t AddPackedPool(const PoolMemory& memory, int64_t num_blocks, const BlockShape& shape,
                      PackedLayout layout, int64_t block_stride_bytes);

// Forgets the pool; calls already running finish first in their own time, keepalive outlives them.
// False where the ID is unknown.
bool RemovePool(int64_t pool_id);

// Lets devices read the memory of a host pool, until the pool and the transfers that use it end.
// Throws std::invalid_argument for a pool of a device or one that is pinned, std::runtime_error
// where the device refuses. False where the ID is unknown.
bool PinPool(int64_t pool_id);

// Null where the ID is unknown, or the pool's memory is a device's: only calls that ask for any
// pool know what to do with that.
std::shared_ptr<Pool> FindPool(int64_t pool_id);
std::shared_ptr<Pool> FindAnyPool(int64_t pool_id);

int64_t NumPools();

}  // namespace blockcompact
