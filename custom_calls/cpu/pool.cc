#include "blockcompact/pool.h"

#include <algorithm>
#include <array>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "blockcompact/device.h"

namespace blockcompact {
namespace {

struct Registry {
  std::mutex mutex;
  int64_t next_pool_id = 1;
  std::unordered_map<int64_t, std::shared_ptr<Pool>> pools;
};

// Never destroyed: calls may still run while the process ends.
Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

struct Dim {
  const char* name;
  int64_t extent;
  int64_t stride_bytes;
};

[[noreturn]] void Refuse(const std::string& message) { throw std::invalid_argument(message); }

int64_t CheckedMultiplyAdd(int64_t sum, int64_t factor, int64_t stride_bytes) {
  int64_t product = 0;
  int64_t total = 0;
  if (__builtin_mul_overflow(factor, stride_bytes, &product) ||
      __builtin_add_overflow(sum, product, &total)) {
    Refuse("`strides` reach past 2^63 bytes; give strides in elements of this pool");
  }
  return total;
}

// Bytes from the base to one past the last element. Refuses strides that fold elements together.
int64_t CheckedExtent(std::vector<Dim> dims, int64_t run_bytes) {
  std::stable_sort(dims.begin(), dims.end(),
                   [](const Dim& a, const Dim& b) { return a.stride_bytes < b.stride_bytes; });
  int64_t extent_bytes = run_bytes;
  for (const Dim& dim : dims) {
    if (dim.extent <= 1) continue;
    if (dim.stride_bytes < extent_bytes) {
      Refuse(std::string("`strides.") + dim.name + "` is " + std::to_string(dim.stride_bytes) +
             " bytes, less than the " + std::to_string(extent_bytes) +
             " bytes it has to step over; elements would overlap");
    }
    extent_bytes = CheckedMultiplyAdd(extent_bytes, dim.extent - 1, dim.stride_bytes);
  }
  return extent_bytes;
}

void CheckMemory(const PoolMemory& memory, int64_t num_blocks, int64_t element_bytes) {
  if (memory.num_layers <= 0) {
    Refuse("`num_layers` is " + std::to_string(memory.num_layers) + "; it must be positive");
  }
  if (num_blocks <= 0 || num_blocks > INT32_MAX) {
    Refuse("`num_blocks` is " + std::to_string(num_blocks) + "; it must be in [1, 2^31 - 1]");
  }
  const int64_t num_allocations = static_cast<int64_t>(memory.allocations.size());
  if (num_allocations != 1 && num_allocations != memory.num_layers) {
    Refuse("`pointer` has " + std::to_string(num_allocations) + " addresses for `num_layers` = " +
           std::to_string(memory.num_layers) + "; give one, or one for each layer");
  }
  for (const std::byte* allocation : memory.allocations) {
    const auto address = reinterpret_cast<uintptr_t>(allocation);
    if (address == 0 || address % static_cast<uintptr_t>(element_bytes) != 0) {
      Refuse("`pointer` " + std::to_string(address) + " is null or not aligned to `element_bytes`");
    }
  }
}

// Called last: it may start the device's driver.
void CheckDevice(const PoolMemory& memory) {
  const int32_t device = memory.stream.device;
  if (device == kHostDevice) return;
  DeviceRuntime* runtime = GetDeviceRuntime();
  if (runtime == nullptr) {
    Refuse(
        "`device` is " + std::to_string(device) +
        " but the CUDA component is not there; install with -Ccmake.define.BLOCKCOMPACT_CUDA=ON");
  }
  for (const std::byte* allocation : memory.allocations) {
    const int32_t found = runtime->PlaceOf(allocation).device;
    if (found == device) continue;
    Refuse("`pointer` is memory of " +
           (found == kHostDevice ? std::string("the host") : "device " + std::to_string(found)) +
           ", not of `device` " + std::to_string(device));
  }
}

bool HasAllocationPerLayer(const PoolMemory& memory) {
  return memory.num_layers > 1 && memory.allocations.size() > 1;
}

// The dimensions that one allocation holds, checked against its size.
void CheckExtent(const PoolMemory& memory, std::vector<Dim> dims, int64_t run_bytes) {
  if (!HasAllocationPerLayer(memory)) {
    dims.push_back({"layer", memory.num_layers, memory.layer_stride_bytes});
  }
  const int64_t extent_bytes = CheckedExtent(std::move(dims), run_bytes);
  if (extent_bytes > memory.size_bytes) {
    Refuse("the pool reaches " + std::to_string(extent_bytes) + " bytes from `pointer` but " +
           "`size_bytes` is " + std::to_string(memory.size_bytes) +
           "; check `num_blocks`, `num_layers` and `strides`");
  }
}

std::vector<std::byte*> LayerBases(const PoolMemory& memory) {
  if (HasAllocationPerLayer(memory)) return memory.allocations;
  std::vector<std::byte*> bases;
  for (int64_t layer = 0; layer < memory.num_layers; ++layer) {
    bases.push_back(memory.allocations[0] + layer * memory.layer_stride_bytes);
  }
  return bases;
}

// Without overlaps: one row may stand for several, and memory is pinned once.
std::vector<MemorySpan> Merged(std::vector<MemorySpan> spans) {
  std::sort(spans.begin(), spans.end(), [](const MemorySpan& a, const MemorySpan& b) {
    return std::less<>()(a.begin, b.begin);
  });
  std::vector<MemorySpan> merged;
  for (const MemorySpan& span : spans) {
    if (merged.empty() || span.begin >= merged.back().end) {
      merged.push_back(span);
    } else {
      merged.back().end = std::max(merged.back().end, span.end);
    }
  }
  return merged;
}

int64_t Add(const PoolMemory& memory, std::variant<PlainView, PackedView> view) {
  CheckDevice(memory);
  auto pool = std::make_shared<Pool>();
  pool->view = std::move(view);
  for (const std::byte* allocation : memory.allocations) {
    pool->spans.push_back({allocation, allocation + memory.size_bytes});
  }
  pool->is_writable = memory.is_writable;
  pool->keepalive = memory.keepalive;
  pool->stream = memory.stream;
  Registry& registry = GetRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  pool->pool_id = registry.next_pool_id++;
  registry.pools[pool->pool_id] = pool;
  return pool->pool_id;
}

}  // namespace

int64_t AddPlainPool(const PoolMemory& memory, int64_t num_blocks, const BlockShape& shape,
                     const PlainStrides& strides) {
  const std::string problem = PlainShapeProblem(shape);
  if (!problem.empty()) Refuse(problem);
  CheckMemory(memory, num_blocks, shape.element_bytes);
  CheckExtent(memory,
              {{"kv", 2, strides.kv_bytes},
               {"block", num_blocks, strides.block_bytes},
               {"head", shape.num_heads, strides.head_bytes},
               {"token", shape.block_tokens, strides.token_bytes}},
              shape.token_bytes());
  return Add(memory, PlainView{LayerBases(memory), num_blocks, shape, strides});
}

int64_t AddPackedPool(const PoolMemory& memory, int64_t num_blocks, const BlockShape& shape,
                      PackedLayout layout, int64_t block_stride_bytes) {
  const std::string problem = PackedShapeProblem(layout, shape);
  if (!problem.empty()) Refuse(problem);
  CheckMemory(memory, num_blocks, shape.element_bytes);
  CheckExtent(memory, {{"block", num_blocks, block_stride_bytes}}, shape.packed_row_bytes());
  return Add(memory, PackedView{LayerBases(memory), num_blocks, shape, layout, block_stride_bytes});
}

bool RemovePool(int64_t pool_id) {
  std::shared_ptr<Pool> removed;  // released after the lock: its keepalive may run foreign code
  Registry& registry = GetRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.pools.find(pool_id);
  if (found == registry.pools.end()) return false;
  removed = std::move(found->second);
  registry.pools.erase(found);
  return true;
}

std::shared_ptr<Pool> FindPool(int64_t pool_id) {
  std::shared_ptr<Pool> pool = FindAnyPool(pool_id);
  return pool == nullptr || pool->is_on_device() ? nullptr : pool;
}

std::shared_ptr<Pool> FindAnyPool(int64_t pool_id) {
  Registry& registry = GetRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.pools.find(pool_id);
  return found == registry.pools.end() ? nullptr : found->second;
}

bool PinPool(int64_t pool_id) {
  const std::shared_ptr<Pool> pool = FindAnyPool(pool_id);
  if (pool == nullptr) return false;
  const std::unique_lock<std::shared_mutex> lock(pool->mutex);
  if (pool->is_on_device()) Refuse("the pool's memory is a device's; pin memory of the host");
  if (pool->pinned != nullptr) Refuse("the pool is pinned already; pin it once");
  DeviceRuntime* runtime = GetDeviceRuntime();
  if (runtime == nullptr) {
    Refuse("the CUDA component is not there; install with -Ccmake.define.BLOCKCOMPACT_CUDA=ON");
  }
  auto unpin = [runtime](std::vector<const std::byte*>* begins) {
    for (const std::byte* begin : *begins) runtime->Unpin(begin);
    delete begins;
  };
  const std::shared_ptr<std::vector<const std::byte*>> pinned(new std::vector<const std::byte*>,
                                                              unpin);
  for (const MemorySpan& span : Merged(pool->spans)) {
    runtime->Pin(span.begin, span.end - span.begin);
    pinned->push_back(span.begin);
  }
  pool->pinned = pinned;
  return true;
}

int64_t NumPools() {
  Registry& registry = GetRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  return static_cast<int64_t>(registry.pools.size());
}

}  // namespace blockcompact
