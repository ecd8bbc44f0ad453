#include "blockcompact/emulated_device.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "blockcompact/grid_dispatch.h"
#include "blockcompact/grid_serial.h"

namespace blockcompact {

using Lock = std::lock_guard<std::mutex>;

void EmulatedDevice::AddSpan(const std::byte* begin, int64_t num_bytes, int32_t device) {
  const Lock lock(mutex_);
  if (!spans_.insert({begin, {num_bytes, device}}).second) {
    throw std::runtime_error("emulated device: the memory is known already");
  }
}

void EmulatedDevice::AddMemory(const std::byte* begin, int64_t num_bytes, int32_t device) {
  AddSpan(begin, num_bytes, device);
}

void EmulatedDevice::RemoveMemory(const std::byte* begin) {
  const Lock lock(mutex_);
  spans_.erase(begin);
}

MemoryPlace EmulatedDevice::PlaceOf(const void* address) {
  const auto* place = static_cast<const std::byte*>(address);
  const Lock lock(mutex_);
  auto after = spans_.upper_bound(place);
  if (after == spans_.begin()) return {};
  const auto& [begin, span] = *--after;
  if (place >= begin + span.num_bytes) return {};
  return {span.device, const_cast<std::byte*>(place)};
}

std::byte* EmulatedDevice::Allocate(int32_t device, int64_t num_bytes) {
  constexpr size_t kAlignment = 256;
  const size_t padded = (static_cast<size_t>(num_bytes) + kAlignment - 1) / kAlignment * kAlignment;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, padded));
  if (memory == nullptr) throw std::runtime_error("emulated device: out of memory");
  AddSpan(memory, num_bytes, device);
  return memory;
}

void EmulatedDevice::Free(int32_t, std::byte* memory) noexcept {
  RemoveMemory(memory);
  std::free(memory);
}

std::byte* EmulatedDevice::AllocatePinned(int64_t num_bytes) {
  return Allocate(kHostDevice, num_bytes);
}

void EmulatedDevice::FreePinned(std::byte* memory) noexcept { Free(kHostDevice, memory); }

void EmulatedDevice::Pin(const std::byte* memory, int64_t num_bytes) {
  AddSpan(memory, num_bytes, kHostDevice);
}

void EmulatedDevice::Unpin(const std::byte* memory) noexcept { RemoveMemory(memory); }

DeviceStream EmulatedDevice::MakeStream(int32_t device) {
  const Lock lock(mutex_);
  return {device, reinterpret_cast<void*>(++num_streams_)};
}

void EmulatedDevice::Push(const DeviceStream& stream, Work work) {
  const Lock lock(mutex_);
  streams_[stream.handle].push_back(std::move(work));
}

void EmulatedDevice::Enqueue(const DeviceStream& stream, std::function<void()> work) {
  Push(stream, {std::move(work), nullptr, nullptr});
}

// An event is the last point that was recorded in it.
DeviceRuntime::Event EmulatedDevice::MakeEvent(int32_t) {
  return new std::shared_ptr<Point>(std::make_shared<Point>(Point{true}));
}

void EmulatedDevice::DestroyEvent(Event event) noexcept {
  delete static_cast<std::shared_ptr<Point>*>(event);
}

void EmulatedDevice::Record(Event event, const DeviceStream& stream) {
  auto point = std::make_shared<Point>();
  *static_cast<std::shared_ptr<Point>*>(event) = point;
  Push(stream, {nullptr, nullptr, std::move(point)});
}

void EmulatedDevice::WaitInStream(const DeviceStream& stream, Event event) {
  Push(stream, {nullptr, *static_cast<std::shared_ptr<Point>*>(event), nullptr});
}

bool EmulatedDevice::IsDone(Event event) {
  const Lock lock(mutex_);
  return (*static_cast<std::shared_ptr<Point>*>(event))->is_done;
}

void EmulatedDevice::Synchronize(Event event) {
  const std::shared_ptr<const Point> point = *static_cast<std::shared_ptr<Point>*>(event);
  RunUntil([&] { return point->is_done; });
}

bool EmulatedDevice::RunOne() {
  const auto run = [](std::deque<Work>& works) {
    if (works.empty()) return false;
    Work& work = works.front();
    if (work.before != nullptr && !work.before->is_done) return false;
    if (work.run) work.run();
    if (work.point != nullptr) work.point->is_done = true;
    works.pop_front();
    return true;
  };
  if (is_newest_first_) {
    for (auto stream = streams_.rbegin(); stream != streams_.rend(); ++stream) {
      if (run(stream->second)) return true;
    }
  } else {
    for (auto& [handle, works] : streams_) {
      if (run(works)) return true;
    }
  }
  return false;
}

void EmulatedDevice::RunUntil(const std::function<bool()>& is_reached) {
  std::unique_lock<std::mutex> lock(mutex_);
  released_.wait(lock, [&] { return !is_held_; });
  while (!is_reached()) {
    if (!RunOne()) throw std::runtime_error("emulated device: the streams wait for each other");
  }
  const std::string fault = std::exchange(fault_, "");
  if (!fault.empty()) throw std::runtime_error(fault);
}

void EmulatedDevice::Hold(bool is_held) {
  const Lock lock(mutex_);
  is_held_ = is_held;
  released_.notify_all();
}

void EmulatedDevice::RunNewestFirst(bool is_newest_first) {
  const Lock lock(mutex_);
  is_newest_first_ = is_newest_first;
}

void EmulatedDevice::FailNextWait(const std::string& fault) {
  const Lock lock(mutex_);
  fault_ = fault;
}

int64_t EmulatedDevice::num_pending() {
  const Lock lock(mutex_);
  return NumPending();
}

int64_t EmulatedDevice::NumPending() const {
  int64_t num_pending = 0;
  for (const auto& [handle, works] : streams_) num_pending += static_cast<int64_t>(works.size());
  return num_pending;
}

void EmulatedDevice::RunAll() {
  RunUntil([this] { return NumPending() == 0; });
}

void EmulatedDevice::Copy(std::byte* to, const std::byte* from, int64_t num_bytes,
                          const DeviceStream& stream) {
  if (num_bytes <= 0) return;
  Enqueue(stream, [=] { std::memcpy(to, from, static_cast<size_t>(num_bytes)); });
}

void EmulatedDevice::Unpack(PackedLayout layout, const GridPacked& from, const GridPlain& to,
                            const BlockShape& shape, const GridRows& rows,
                            const DeviceStream& stream) {
  Enqueue(stream, [=] { LaunchUnpack(layout, from, to, shape, rows, SerialGrid{}); });
}

void EmulatedDevice::Pack(PackedLayout layout, const GridPlain& from, const GridPacked& to,
                          const BlockShape& shape, const GridRows& rows,
                          const DeviceStream& stream) {
  Enqueue(stream, [=] { LaunchPack(layout, from, to, shape, rows, SerialGrid{}); });
}

void EmulatedDevice::CopyBlocks(const GridPlain& from, const GridPlain& to, const BlockShape& shape,
                                const GridRows& rows, const DeviceStream& stream) {
  Enqueue(stream, [=] { LaunchGather(from, to, shape, rows, SerialGrid{}); });
}

void EmulatedDevice::Score(GridOrder order, const GridKeys& keys, const GridQueries& queries,
                           const GridScores& to, const DeviceStream& stream) {
  Enqueue(stream, [=] { LaunchScores(order, keys, queries, to, SerialGrid{}); });
}

void EmulatedDevice::Attend(GridOrder order, const GridAttend& call, const DeviceStream& stream) {
  Enqueue(stream, [=] { LaunchAttend(order, call, SerialGrid{}); });
}

}  // namespace blockcompact
