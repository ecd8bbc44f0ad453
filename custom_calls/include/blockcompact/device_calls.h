// Calls on pools of a device. The rows were checked on the host and lie there; both pools are
// locked. Every call is one launch for all layers (a move: up to three), in the order of a stream,
// after what the owners of both pools have enqueued so far.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "blockcompact/device.h"
#include "blockcompact/pool.h"
#include "blockcompact/rows.h"
#include "blockcompact/views.h"

namespace blockcompact {

// A call that was enqueued.
class DeviceCall {
 public:
  DeviceCall(std::shared_ptr<const DeviceEvent> done, std::vector<DeviceStream> owners)
      : done_(std::move(done)), owners_(std::move(owners)) {}

  // Returns when the device has done it; throws std::runtime_error where it failed.
  void Wait() const { done_->Synchronize(); }
  // What the pools' owners enqueue from now on comes after it; does not wait.
  void WaitInStream() const {
    for (const DeviceStream& owner : owners_) done_->WaitInStream(owner);
  }

 private:
  std::shared_ptr<const DeviceEvent> done_;
  std::vector<DeviceStream> owners_;  // of the pools on the device
};

// Whether calls between the two can run: both on the host; or the plain one on a device, and the
// packed one there too or in host memory that the device reads.
bool CanMeet(const Pool& plain, const Pool& packed);

enum class DeviceOrder {
  kInStream,  // on the stream of the plain pool's owner
  kBeside,    // on a stream of ours, after what the owner has enqueued so far
};

// Packed rows into plain blocks.
DeviceCall EnqueueUnpack(const Pool& packed, const Pool& plain, const Rows& rows,
                         DeviceOrder order);

// The others return when they are done.
void DevicePack(const Pool& plain, const Pool& packed, const Rows& rows);
void DeviceMove(const Pool& pool, const Rows& rows);
// `out` is host memory.
void DeviceGather(const Pool& plain, const PlainView& out, const Rows& rows);

}  // namespace blockcompact
