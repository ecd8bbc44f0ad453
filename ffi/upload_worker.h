// Uploads that run beside their caller, one after another: on one thread of the module, which only
// waits for those to a device.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "blockcompact/pool_calls.h"

namespace blockcompact_ffi {

// Completion of one upload. It may be dropped at any time; the upload goes on without it.
class UploadEvent {
 public:
  bool IsDone() const;
  // False where the time is over first; no time: waits until done.
  bool Wait(std::optional<std::chrono::nanoseconds> timeout) const;
  // What the owner of a pool on a device enqueues from now on comes after the upload; does not
  // wait. On the host it waits, and false says that the upload failed.
  bool WaitInStream() const;
  // What went wrong; "" where nothing did or the upload is not done.
  std::string error() const;

  explicit UploadEvent(std::shared_ptr<const blockcompact::DeviceCall> enqueued = nullptr)
      : enqueued_(std::move(enqueued)) {}

  void Finish(const std::string& error);

 private:
  bool IsForeign() const { return getpid() != owner_; }

  const pid_t owner_ = getpid();
  const std::shared_ptr<const blockcompact::DeviceCall> enqueued_;  // on a device
  mutable std::mutex mutex_;
  mutable std::condition_variable done_;
  bool is_done_ = false;
  std::string error_;
};

// Runs the upload after those submitted before it. When the event is done, the upload's blocks are
// no longer open and `lease` is let go.
std::shared_ptr<UploadEvent> SubmitUpload(std::unique_ptr<blockcompact::BegunUpload> upload,
                                          std::shared_ptr<void> lease);

// For tests: holds uploads back before their first byte until they are released. A non-empty
// `fault` makes the next upload fail with it instead of running.
void HoldUploads(bool is_held, const std::string& fault);

// Releases what is held and returns when nothing is left to run.
void DrainUploads();

}  // namespace blockcompact_ffi
