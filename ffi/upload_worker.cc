#include "upload_worker.h"

#include <deque>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

#include "blockcompact/device_calls.h"
#include "per_process.h"

namespace blockcompact_ffi {
namespace {

struct Job {
  std::unique_ptr<blockcompact::BegunUpload> upload;
  std::shared_ptr<void> lease;
  std::shared_ptr<UploadEvent> event;
};

std::string Run(const blockcompact::BegunUpload& upload, const std::string& fault) {
  try {
    if (!fault.empty()) throw std::runtime_error(fault);
    upload.Run(blockcompact::SerialFor);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

class Worker {
 public:
  void Submit(Job job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_started_) std::thread([this] { Serve(); }).detach();
    is_started_ = true;
    jobs_.push_back(std::move(job));
    changed_.notify_all();
  }

  void Hold(bool is_held, const std::string& fault) {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_held_ = is_held;
    fault_ = fault;
    changed_.notify_all();
  }

  void Drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    is_held_ = false;
    changed_.notify_all();
    changed_.wait(lock, [&] { return jobs_.empty() && !is_running_; });
  }

 private:
  [[noreturn]] void Serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !jobs_.empty() && !is_held_; });
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      is_running_ = true;
      const std::string fault = std::exchange(fault_, "");
      lock.unlock();
      const std::string error = Run(*job.upload, fault);
      job.upload.reset();  // before the event: whoever waited for it may use the blocks again
      job.lease.reset();
      job.event->Finish(error);
      job.event.reset();
      lock.lock();
      is_running_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool is_started_ = false;
  bool is_running_ = false;
  bool is_held_ = false;
  std::string fault_;
};

}  // namespace

bool UploadEvent::IsDone() const {
  if (IsForeign()) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_done_;
}

bool UploadEvent::Wait(std::optional<std::chrono::nanoseconds> timeout) const {
  if (IsForeign()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_done = [this] { return is_done_; };
  if (timeout) return done_.wait_for(lock, *timeout, is_done);
  done_.wait(lock, is_done);
  return true;
}

bool UploadEvent::WaitInStream() const {
  if (IsForeign() || enqueued_ == nullptr) {
    Wait(std::nullopt);
    return error().empty();
  }
  enqueued_->WaitInStream();
  return true;
}

std::string UploadEvent::error() const {
  if (IsForeign()) {
    return "it was started in process " + std::to_string(owner_) +
           ", whose fork this process is, and runs only there";
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void UploadEvent::Finish(const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_done_ = true;
  error_ = error;
  done_.notify_all();
}

std::shared_ptr<UploadEvent> SubmitUpload(std::unique_ptr<blockcompact::BegunUpload> upload,
                                          std::shared_ptr<void> lease) {
  auto event = std::make_shared<UploadEvent>(upload->enqueued);
  PerProcess<Worker>().Submit({std::move(upload), std::move(lease), event});
  return event;
}

void HoldUploads(bool is_held, const std::string& fault) {
  PerProcess<Worker>().Hold(is_held, fault);
}

void DrainUploads() { PerProcess<Worker>().Drain(); }

}  // namespace blockcompact_ffi
