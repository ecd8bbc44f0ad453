// How independent tasks are spread: the caller brings its own threads, kernels make none.
#pragma once

#include <cstdint>
#include <functional>

namespace blockcompact {

using Task = std::function<void(int64_t task)>;

// Runs task(0) ... task(num_tasks - 1), in any order, and returns when all are done.
using ParallelFor = std::function<void(int64_t num_tasks, const Task& task)>;

inline void SerialFor(int64_t num_tasks, const Task& task) {
  for (int64_t i = 0; i < num_tasks; ++i) task(i);
}

}  // namespace blockcompact
