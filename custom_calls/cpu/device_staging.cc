#include "device_staging.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace blockcompact {

StagingSlot* DeviceStaging::Take(int64_t pinned_bytes, int64_t device_bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  StagingSlot* slot = FindIdle(lock);
  Grow(slot, pinned_bytes, device_bytes);
  slot->is_taken = true;
  return slot;
}

// May let go of the lock while it waits.
StagingSlot* DeviceStaging::FindIdle(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    for (const auto& slot : slots_) {
      if (slot->is_taken) continue;
      if (slot->last_use == nullptr || slot->last_use->IsDone()) return slot.get();
    }
    if (slots_.size() < max_slots_) {
      slots_.push_back(std::make_unique<StagingSlot>());
      return slots_.back().get();
    }
    std::shared_ptr<const DeviceEvent> oldest;
    for (const auto& slot : slots_) {
      if (oldest == nullptr && !slot->is_taken) oldest = slot->last_use;
    }
    lock.unlock();
    if (oldest != nullptr) {
      oldest->Synchronize();
    } else {
      std::this_thread::yield();  // all are being filled, which takes microseconds
    }
    lock.lock();
  }
}

void DeviceStaging::Grow(StagingSlot* slot, int64_t pinned_bytes, int64_t device_bytes) {
  constexpr int64_t kLeastBytes = 64 << 10;
  if (slot->pinned_bytes < pinned_bytes) {
    const int64_t grown = std::max({pinned_bytes, 2 * slot->pinned_bytes, kLeastBytes});
    if (slot->pinned != nullptr) runtime_.FreePinned(std::exchange(slot->pinned, nullptr));
    slot->pinned_bytes = 0;
    slot->pinned = runtime_.AllocatePinned(grown);
    slot->pinned_bytes = grown;
  }
  if (slot->device_bytes < device_bytes) {
    if (slot->on_device != nullptr) {
      runtime_.Free(device_, std::exchange(slot->on_device, nullptr));
    }
    const int64_t held = std::exchange(slot->device_bytes, 0);
    const int64_t grown = std::max({device_bytes, 2 * held, kLeastBytes});
    slot->on_device = runtime_.Allocate(device_, grown);
    slot->device_bytes = grown;
  }
}

void DeviceStaging::Return(StagingSlot* slot, std::shared_ptr<const DeviceEvent> use) {
  const std::lock_guard<std::mutex> lock(mutex_);
  slot->is_taken = false;
  slot->last_use = std::move(use);
  const auto at = Find(slot);
  std::rotate(at, at + 1, slots_.end());
}

void DeviceStaging::Abandon(StagingSlot* slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = Find(slot);
  abandoned_.push_back(std::move(*at));
  slots_.erase(at);
}

std::vector<std::unique_ptr<StagingSlot>>::iterator DeviceStaging::Find(const StagingSlot* slot) {
  return std::find_if(slots_.begin(), slots_.end(),
                      [&](const auto& other) { return other.get() == slot; });
}

}  // namespace blockcompact
