// What we keep of each device, and the way of a call's columns there.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "blockcompact/device.h"
#include "blockcompact/rows.h"
#include "blockcompact/views.h"
#include "device_staging.h"

namespace blockcompact {

// A stream of ours and staging.
struct DeviceContext {
  DeviceContext(DeviceRuntime& its_runtime, int32_t device)
      : runtime(its_runtime),
        stream(its_runtime.MakeStream(device)),
        staging(its_runtime, device) {}

  DeviceRuntime& runtime;
  const DeviceStream stream;
  DeviceStaging staging;
};

// Made on first use, never destroyed: transfers may still run while the process ends.
DeviceContext& ContextOf(int32_t device);

// The columns of one call, in one staging slot and one copy, and scratch for it. Where the call is
// not enqueued as a whole, the slot waits for what was.
class DeviceColumns {
 public:
  // For up to 6 columns of `num_rows`, 3 numbers, and the layers of up to 2 views.
  DeviceColumns(DeviceContext& context, const DeviceStream& stream, int64_t num_rows,
                int64_t num_layers, int64_t scratch_bytes = 0);
  ~DeviceColumns();
  DeviceColumns(const DeviceColumns&) = delete;
  DeviceColumns& operator=(const DeviceColumns&) = delete;

  // Where the device will find a copy; null for null.
  const int32_t* Put(const int32_t* column, int64_t count) { return PutBytes(column, count); }
  const int64_t* Put(const int64_t* column, int64_t count) { return PutBytes(column, count); }
  Rows Put(const Rows& rows);
  GridPlain Put(const PlainView& view);
  GridPacked Put(const PackedView& view);
  void Send() { context_.runtime.Copy(slot_->on_device, slot_->pinned, used_, stream_); }

  std::byte* scratch() const { return slot_->on_device + columns_bytes_; }
  // What comes after the call; the slot may be used again after it.
  std::shared_ptr<const DeviceEvent> Finish();

 private:
  template <typename T>
  const T* PutBytes(const T* column, int64_t count);

  DeviceContext& context_;
  const DeviceStream stream_;
  const int64_t columns_bytes_;
  StagingSlot* slot_;
  int64_t used_ = 0;
};

}  // namespace blockcompact
