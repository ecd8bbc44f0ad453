// What calls on pools of a device need of it, as an interface: the CUDA component implements it
// (cuda/device_runtime.cc), and an emulated device for tests (emulated_device.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "blockcompact/device_stream.h"
#include "blockcompact/grid_attend.h"
#include "blockcompact/grid_moves.h"
#include "blockcompact/grid_rows.h"
#include "blockcompact/grid_scores.h"
#include "blockcompact/layout.h"

namespace blockcompact {

// Whose memory an address is of, and where devices see it.
struct MemoryPlace {
  int32_t device = kHostDevice;
  std::byte* device_address = nullptr;  // null: pageable host memory, which no device reads
};

// All throw std::runtime_error with a sentence where the device refuses. Copies and launches are
// asynchronous, in the order of their stream. Pointers inside of the views and rows of a launch are
// those that the device reads.
class DeviceRuntime {
 public:
  using Event = void*;

  virtual ~DeviceRuntime() = default;
  virtual MemoryPlace PlaceOf(const void* address) = 0;

  virtual DeviceStream MakeStream(int32_t device) = 0;
  virtual Event MakeEvent(int32_t device) = 0;
  virtual void DestroyEvent(Event event) noexcept = 0;
  virtual void Record(Event event, const DeviceStream& stream) = 0;
  virtual void WaitInStream(const DeviceStream& stream, Event event) = 0;
  virtual bool IsDone(Event event) = 0;
  virtual void Synchronize(Event event) = 0;  // throws also where the work before it failed

  virtual std::byte* Allocate(int32_t device, int64_t num_bytes) = 0;
  virtual void Free(int32_t device, std::byte* memory) noexcept = 0;  // waits for the device
  virtual std::byte* AllocatePinned(int64_t num_bytes) = 0;
  virtual void FreePinned(std::byte* memory) noexcept = 0;
  virtual void Pin(const std::byte* memory, int64_t num_bytes) = 0;
  virtual void Unpin(const std::byte* memory) noexcept = 0;

  virtual void Copy(std::byte* to, const std::byte* from, int64_t num_bytes,
                    const DeviceStream& stream) = 0;
  virtual void Unpack(PackedLayout layout, const GridPacked& from, const GridPlain& to,
                      const BlockShape& shape, const GridRows& rows,
                      const DeviceStream& stream) = 0;
  virtual void Pack(PackedLayout layout, const GridPlain& from, const GridPacked& to,
                    const BlockShape& shape, const GridRows& rows, const DeviceStream& stream) = 0;
  virtual void CopyBlocks(const GridPlain& from, const GridPlain& to, const BlockShape& shape,
                          const GridRows& rows, const DeviceStream& stream) = 0;
  virtual void Score(GridOrder order, const GridKeys& keys, const GridQueries& queries,
                     const GridScores& to, const DeviceStream& stream) = 0;
  virtual void Attend(GridOrder order, const GridAttend& call, const DeviceStream& stream) = 0;
};

// The runtime of this process; null where the CUDA component is not there. It is never destroyed.
void SetDeviceRuntime(DeviceRuntime* runtime);
DeviceRuntime* GetDeviceRuntime();

// A point in a stream. Work before it is done when it is done.
class DeviceEvent {
 public:
  DeviceEvent(DeviceRuntime& runtime, const DeviceStream& stream);  // recorded at once
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  bool IsDone() const { return runtime_.IsDone(event_); }
  void Synchronize() const { runtime_.Synchronize(event_); }
  void WaitInStream(const DeviceStream& stream) const { runtime_.WaitInStream(stream, event_); }

 private:
  DeviceRuntime& runtime_;
  DeviceRuntime::Event event_;
};

}  // namespace blockcompact
