// Tasks of one call, taken by whoever has time for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "blockcompact/parallel.h"

namespace blockcompact_ffi {

// Outlives the call where threads share it: a helper may look in after all tasks are done.
class SharedTasks {
 public:
  SharedTasks(int64_t num_tasks, const blockcompact::Task& task)
      : task_(&task), num_tasks_(num_tasks) {}

  // Runs tasks until none is left to take.
  void Work() {
    int64_t num_run = 0;
    for (int64_t i = next_.fetch_add(1); i < num_tasks_; i = next_.fetch_add(1)) {
      (*task_)(i);
      ++num_run;
    }
    if (num_run == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    num_done_ += num_run;
    if (num_done_ == num_tasks_) all_done_.notify_all();
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [&] { return num_done_ == num_tasks_; });
  }

 private:
  const blockcompact::Task* task_;
  const int64_t num_tasks_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t num_done_ = 0;
};

}  // namespace blockcompact_ffi
