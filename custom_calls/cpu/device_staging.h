// Memory through which the columns of calls travel to a device, and when it may be used again.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "blockcompact/device.h"

namespace blockcompact {

// A pinned buffer, and memory of the device for its copy and for scratch of the call. The device
// may use both until `last_use` is done.
struct StagingSlot {
  std::byte* pinned = nullptr;
  std::byte* on_device = nullptr;
  int64_t pinned_bytes = 0;
  int64_t device_bytes = 0;
  bool is_taken = false;                        // being filled
  std::shared_ptr<const DeviceEvent> last_use;  // null: never used
};

// The slots of one device. Thread-safe.
class DeviceStaging {
 public:
  static constexpr size_t kMaxSlots = 8;

  DeviceStaging(DeviceRuntime& runtime, int32_t device, size_t max_slots = kMaxSlots)
      : runtime_(runtime), device_(device), max_slots_(max_slots) {}

  // A slot whose last use is done (UPL-4). Waits for the one used longest ago where `max_slots` are
  // in use.
  StagingSlot* Take(int64_t pinned_bytes, int64_t device_bytes);
  // The slot may be taken again once `use` is done.
  void Return(StagingSlot* slot, std::shared_ptr<const DeviceEvent> use);
  // For a slot of which nobody knows when its use is done: it is never taken again, its memory
  // never freed.
  void Abandon(StagingSlot* slot);

 private:
  StagingSlot* FindIdle(std::unique_lock<std::mutex>& lock);
  std::vector<std::unique_ptr<StagingSlot>>::iterator Find(const StagingSlot* slot);
  void Grow(StagingSlot* slot, int64_t pinned_bytes, int64_t device_bytes);

  DeviceRuntime& runtime_;
  const int32_t device_;
  const size_t max_slots_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<StagingSlot>> slots_;  // the one used longest ago first
  std::vector<std::unique_ptr<StagingSlot>> abandoned_;
};

}  // namespace blockcompact
