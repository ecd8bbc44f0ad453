#include "host_threads.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "per_process.h"
#include "shared_tasks.h"

namespace blockcompact_ffi {
namespace {

constexpr char kNumThreadsVariable[] = "BLOCKCOMPACT_NUM_THREADS";
constexpr int64_t kMaxThreads = 1024;

int64_t DefaultNumThreads() {
  const char* text = std::getenv(kNumThreadsVariable);
  if (text == nullptr || text[0] == '\0') {
    return std::max<int64_t>(1, std::thread::hardware_concurrency());
  }
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  if (*end != '\0' || value < 1 || value > kMaxThreads) {
    throw std::invalid_argument(std::string(kNumThreadsVariable) + " is '" + text +
                                "'; it must be a number in [1, 1024]");
  }
  return value;
}

// The entry point of an OpenMP runtime that this process has loaded: runs a function on each thread
// of a team and returns when all are done. 0 threads: as many as the runtime is set to.
using OpenMpParallel = void (*)(void (*function)(void*), void* data, unsigned num_threads,
                                unsigned flags);
std::atomic<pid_t> open_mp_user{0};  // the process that spread tasks over its threads

OpenMpParallel FindOpenMp() {
  return reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
}

void OnOpenMpThreads(OpenMpParallel parallel, int64_t num_tasks, const blockcompact::Task& task) {
  struct Shared {
    const blockcompact::Task* task;
    int64_t num_tasks;
    std::atomic<int64_t> next{0};
  } shared{&task, num_tasks};
  parallel(
      [](void* data) {
        auto* tasks = static_cast<Shared*>(data);
        for (int64_t i = tasks->next.fetch_add(1); i < tasks->num_tasks;
             i = tasks->next.fetch_add(1)) {
          (*tasks->task)(i);
        }
      },
      &shared, 0, 0);
}

class Helpers {
 public:
  // Wakes up to num_helpers threads for the tasks; starts threads that are missing.
  void Offer(int64_t num_helpers, const std::shared_ptr<SharedTasks>& tasks) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (; num_started_ < num_helpers; ++num_started_) {
        std::thread([this] { Serve(); }).detach();
      }
      offers_.insert(offers_.end(), static_cast<size_t>(num_helpers), tasks);
    }
    num_helpers == 1 ? has_offer_.notify_one() : has_offer_.notify_all();
  }

 private:
  [[noreturn]] void Serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      has_offer_.wait(lock, [&] { return !offers_.empty(); });
      const std::shared_ptr<SharedTasks> tasks = std::move(offers_.front());
      offers_.pop_front();
      lock.unlock();
      tasks->Work();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_offer_;
  std::deque<std::shared_ptr<SharedTasks>> offers_;
  int64_t num_started_ = 0;
};

}  // namespace

int64_t NumHostThreads() {
  static const int64_t default_num_threads = DefaultNumThreads();
  return default_num_threads;
}

blockcompact::ParallelFor HostParallelFor(std::optional<int64_t> num_threads) {
  if (num_threads.has_value() && (*num_threads < 1 || *num_threads > kMaxThreads)) {
    throw std::invalid_argument("`num_threads` is " + std::to_string(*num_threads) +
                                "; it must be in [1, 1024], or None for the default");
  }
  const int64_t max_threads = num_threads.has_value() ? *num_threads : NumHostThreads();
  return [max_threads](int64_t num_tasks, const blockcompact::Task& task) {
    const int64_t num_helpers = std::min(max_threads, num_tasks) - 1;
    if (num_helpers <= 0) return blockcompact::SerialFor(num_tasks, task);
    const auto tasks = std::make_shared<SharedTasks>(num_tasks, task);
    PerProcess<Helpers>().Offer(num_helpers, tasks);
    tasks->Work();
    tasks->Wait();
  };
}

bool HasOpenMpThreads() {
  const pid_t user = open_mp_user.load(std::memory_order_relaxed);
  return FindOpenMp() != nullptr && (user == 0 || user == getpid());
}

blockcompact::ParallelFor OpenMpParallelFor() {
  if (!HasOpenMpThreads()) {
    throw std::invalid_argument(
        "`is_on_open_mp` is True; expected a process with an OpenMP runtime that all libraries "
        "see, "
        "and no forked child of one that used it; ask `has_open_mp_threads()` first");
  }
  open_mp_user.store(getpid(), std::memory_order_relaxed);
  return [parallel = FindOpenMp()](int64_t num_tasks, const blockcompact::Task& task) {
    if (num_tasks <= 1) return blockcompact::SerialFor(num_tasks, task);
    OnOpenMpThreads(parallel, num_tasks, task);
  };
}

}  // namespace blockcompact_ffi
