// A device of host memory, for tests: streams do nothing until somebody waits for them, and then in
// an order that no call asked for is broken on purpose. It runs the bodies that the CUDA kernels
// are made of.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "blockcompact/device.h"

namespace blockcompact {

class EmulatedDevice : public DeviceRuntime {
 public:
  static constexpr int32_t kNumDevices = 2;

  // Declares memory of the caller to be the device's, or no longer.
  void AddMemory(const std::byte* begin, int64_t num_bytes, int32_t device);
  void RemoveMemory(const std::byte* begin);
  // Work as the owner of a pool would enqueue it.
  void Enqueue(const DeviceStream& stream, std::function<void()> work);
  // Whoever waits, waits on until it is no longer held.
  void Hold(bool is_held);
  // Whether the newest streams run ahead of the older ones or the reverse.
  void RunNewestFirst(bool is_newest_first);
  // The next wait throws this sentence; "": no fault.
  void FailNextWait(const std::string& fault);
  int64_t num_pending();  // pieces of work that have not run
  void RunAll();

  MemoryPlace PlaceOf(const void* address) override;
  DeviceStream MakeStream(int32_t device) override;
  Event MakeEvent(int32_t device) override;
  void DestroyEvent(Event event) noexcept override;
  void Record(Event event, const DeviceStream& stream) override;
  void WaitInStream(const DeviceStream& stream, Event event) override;
  bool IsDone(Event event) override;
  void Synchronize(Event event) override;
  std::byte* Allocate(int32_t device, int64_t num_bytes) override;
  void Free(int32_t device, std::byte* memory) noexcept override;
  std::byte* AllocatePinned(int64_t num_bytes) override;
  void FreePinned(std::byte* memory) noexcept override;
  void Pin(const std::byte* memory, int64_t num_bytes) override;
  void Unpin(const std::byte* memory) noexcept override;
  void Copy(std::byte* to, const std::byte* from, int64_t num_bytes,
            const DeviceStream& stream) override;
  void Unpack(PackedLayout layout, const GridPacked& from, const GridPlain& to,
              const BlockShape& shape, const GridRows& rows, const DeviceStream& stream) override;
  void Pack(PackedLayout layout, const GridPlain& from, const GridPacked& to,
            const BlockShape& shape, const GridRows& rows, const DeviceStream& stream) override;
  void CopyBlocks(const GridPlain& from, const GridPlain& to, const BlockShape& shape,
                  const GridRows& rows, const DeviceStream& stream) override;
  void Score(GridOrder order, const GridKeys& keys, const GridQueries& queries,
             const GridScores& to, const DeviceStream& stream) override;
  void Attend(GridOrder order, const GridAttend& call, const DeviceStream& stream) override;

 private:
  struct Point {  // in a stream
    bool is_done = false;
  };
  struct Work {
    std::function<void()> run;            // null: nothing
    std::shared_ptr<const Point> before;  // waits for it, where there is one
    std::shared_ptr<Point> point;         // done afterwards, where there is one
  };
  struct Span {
    int64_t num_bytes;
    int32_t device;  // kHostDevice: pinned
  };
  using Streams = std::map<void*, std::deque<Work>>;  // handles grow from stream to stream

  void Push(const DeviceStream& stream, Work work);
  int64_t NumPending() const;
  bool RunOne();  // false where nothing can run
  void RunUntil(const std::function<bool()>& is_reached);
  void AddSpan(const std::byte* begin, int64_t num_bytes, int32_t device);

  std::mutex mutex_;
  std::condition_variable released_;
  bool is_held_ = false;
  bool is_newest_first_ = true;
  std::string fault_;
  intptr_t num_streams_ = 0;
  Streams streams_;
  std::map<const std::byte*, Span> spans_;
};

}  // namespace blockcompact
