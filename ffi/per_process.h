// One object for each process, made on first use and never destroyed.
#pragma once

#include <unistd.h>

#include <atomic>
#include <thread>

namespace blockcompact_ffi {

// For objects with threads: these may still sleep in it while the process ends, and after a fork
// they do not exist and their locks may be held for ever, so the child gets a new object.
template <typename T>
T& PerProcess() {
  static std::atomic<T*> object{nullptr};
  static std::atomic<pid_t> owner{0};
  static std::atomic_flag is_replacing = ATOMIC_FLAG_INIT;
  const pid_t process = getpid();
  if (owner.load(std::memory_order_acquire) == process) return *object.load();
  while (is_replacing.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  if (owner.load(std::memory_order_relaxed) != process) {
    object.store(new T);
    owner.store(process, std::memory_order_release);
  }
  is_replacing.clear(std::memory_order_release);
  return *object.load();
}

}  // namespace blockcompact_ffi
